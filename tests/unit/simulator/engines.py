"""Engines of the simulator in the test's own process: the ranks of one server, which read each other over loopback."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import backhaul_connector
from backhaul_simulator import stand_in
from backhaul_simulator.engine import Engine
from backhaul_simulator.model import Model
from backhaul_simulator.options import EngineOptions
from backhaul_simulator.requests import Output, Request
from tests.fakes.eventually import eventually

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""Parameters of a cold prefill leg."""

TURN = list(range(1000, 1300))
"""A prompt of nine blocks and a bit."""

_ON_VLLM = ("connector", "scheduler", "snapshot")
"""Modules of Backhaul's connector that hold what they found in ``vllm`` when they were imported."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Makes ``vllm`` and ``nixl`` the stand-ins, and leaves no trace of them behind."""
    path = list(sys.path)
    stand_in.use()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "nixl")]:
            del sys.modules[name]
        for name in _ON_VLLM:
            sys.modules.pop(f"backhaul_connector.{name}", None)
        for name in (*_ON_VLLM, "NixlConnector"):
            vars(backhaul_connector).pop(name, None)


@asynccontextmanager
async def engines(count: int = 2, *, port: int, **options: Any) -> AsyncIterator[Sequence[Engine]]:
    """Runs ``count`` engines, without Backhaul's connector unless an option says otherwise.

    An engine that dies raises here what it died of.
    """
    chosen = EngineOptions(**{"connector": False, "side_channel_port": port, "block_count": 256, **options})
    running = [Engine(chosen, rank=rank) for rank in range(count)]
    tasks = [asyncio.create_task(engine.run()) for engine in running]
    try:
        yield running
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in running:
            engine.close()


async def run(
    engine: Engine, prompt: Sequence[int], params: dict[str, Any] | None = None, **fields: Any
) -> tuple[list[int], Output]:
    """Runs a request to its end; returns the answer's tokens and the last output."""
    asked = Request(request_id="request", prompt=list(prompt), kv_transfer_params=params, **{"max_tokens": 8, **fields})
    outputs = [output async for output in engine.generate(asked)]
    return [output.token for output in outputs if output.token is not None], outputs[-1]


async def prefill(
    engine: Engine, prompt: Sequence[int], handle: dict[str, Any] | None = None, *, read_block_s: float = 0.0
) -> dict[str, Any]:
    """Runs a prefill leg, warm with a ``handle``; returns the hand-off."""
    _, last = await run(engine, prompt, {**(handle or {}), **PREFILL}, max_tokens=1, read_block_s=read_block_s)
    assert last.kv_transfer_params is not None
    return last.kv_transfer_params


async def decode(engine: Engine, prompt: Sequence[int], handoff: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Runs a decode leg that does not end by itself; returns its answer and the handle of what is retained."""
    answer, last = await run(engine, prompt, dict(handoff), ignore_eos=True)
    assert last.kv_transfer_params is not None
    return answer, last.kv_transfer_params


def truth(prompt: Sequence[int], max_tokens: int = 8, *, ignore_eos: bool = True) -> list[int]:
    """Returns what an engine without memory or transfers answers."""
    return Model().answer(prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)


async def all_free(engine: Engine) -> None:
    """Waits until nothing is retained or in use."""
    await eventually(lambda: engine.stats().blocks_free == engine.stats().blocks)
