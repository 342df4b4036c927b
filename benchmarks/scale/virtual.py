"""An event loop whose time passes only where all of it waits: hours take seconds, and nothing happens twice."""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class _NeverWaits(selectors.SelectSelector):
    """Tells the loop how long it would have waited, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits for something that never happens")
        self.passed_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Used for code that does no I/O."""

    def __init__(self) -> None:
        self._waits = _NeverWaits()
        super().__init__(self._waits)

    def time(self) -> float:
        """Returns the seconds that have passed."""
        return self._waits.passed_s

    def call_exception_handler(self, context: Mapping[str, Any]) -> None:
        """A fault that nobody would see spoils a measurement: it ends it."""
        super().call_exception_handler(dict(context))
        self.stop()


class VirtualClock:
    """The clock of services that run in such a loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        """Returns the loop's time; it does not begin at 0, as no machine's does."""
        return 1_000.0 + self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(seconds)
