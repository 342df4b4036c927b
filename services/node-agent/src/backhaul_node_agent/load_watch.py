"""Tells any number of watchers what the engines have to do: the latest, and nothing twice but as a sign of life."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from backhaul_common.clock import Clock
from backhaul_common.errors import UnavailableError
from backhaul_node_agent.core.engine_loads import EngineLoad

LIFE_SIGN_S = 0.8
"""Longest silence between two ticks that tell something: a second is promised, and a tick is up to 0.2 s late."""

PAUSE_S = 0.1
"""Shortest time between two messages to one watcher."""

Loads = tuple[EngineLoad, ...]


class LoadWatch:
    """What is known now. Watchers hold no queue: whoever is slow finds the latest when it comes back."""

    def __init__(self, look: Callable[[float], Loads], clock: Clock) -> None:
        """`look` returns what is known at an instant of the clock."""
        self._look = look
        self._clock = clock
        self._loads: Loads = ()
        self._told_at = clock.monotonic()
        self._news = asyncio.Event()
        """Set once there is something newer; each one stands for what is told until then."""
        self._ended = False

    def tick(self) -> None:
        """Looks whether there is something to tell; called again and again."""
        now = self._clock.monotonic()
        loads = self._look(now)
        if loads != self._loads or now - self._told_at >= LIFE_SIGN_S:
            self._loads, self._told_at = loads, now
            self._wake()

    def end(self) -> None:
        """Ends all watches, now and from now on."""
        self._ended = True
        self._wake()

    async def watch(self) -> AsyncGenerator[Loads, None]:
        """Yields what is known, at once and then whenever there is news.

        Ends by UnavailableError (SHUTTING_DOWN) alone.
        """
        while not self._ended:
            news = self._news
            yield self._loads
            await self._clock.sleep(PAUSE_S)
            await news.wait()
        raise UnavailableError("SHUTTING_DOWN", "the agent is shutting down")

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
