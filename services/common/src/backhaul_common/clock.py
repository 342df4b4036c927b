"""Time as a dependency, so that tests own it."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time and waiting."""

    def monotonic(self) -> float:
        """Returns seconds since an arbitrary point; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits for ``seconds``."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Returns seconds since an arbitrary point; never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Waits for ``seconds``."""
        await asyncio.sleep(seconds)
