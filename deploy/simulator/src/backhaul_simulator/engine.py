"""One engine: a data-parallel rank of a simulated vLLM server."""

from collections.abc import AsyncIterator
from typing import Any

from backhaul_simulator.options import EngineOptions
from backhaul_simulator.requests import Output, Request, Stats


class Engine:
    """One rank. The process has called `stand_in.use` and `clock.install` before it makes one.

    The side channel and the transfer port listen once it is made; `run` serves until it is cancelled, and closes them.
    ``engine_id`` is new each time.
    """

    engine_id: str

    def __init__(self, options: EngineOptions, *, rank: int) -> None:
        raise NotImplementedError

    async def run(self) -> None:
        """Schedules until cancelled. Raises what ends the engine: an assertion in a step, as in vLLM.

        Requests in flight then end with EngineDeadError.
        """
        raise NotImplementedError

    def generate(self, request: Request) -> AsyncIterator[Output]:
        """Runs a request. Closing the iterator (or cancelling the task in it) aborts it: nothing is retained.

        Raises LoadFailedError for KV blocks that could not be loaded, EngineDeadError when the engine has ended,
        ValueError for a request that can never run (too long, no token to compute, an id that is in use).
        """
        raise NotImplementedError

    def stats(self) -> Stats:
        """Returns the figures of this moment."""
        raise NotImplementedError

    def ledger(self) -> dict[str, Any]:
        """Returns what the instruments have seen, for JSON."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; False (and nothing is done) while a block is in use, as in vLLM."""
        raise NotImplementedError
