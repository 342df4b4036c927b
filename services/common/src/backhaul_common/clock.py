"""Time as a dependency, so that tests own it."""

import asyncio
import time
from datetime import UTC, datetime
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

    monotonic = staticmethod(time.monotonic)
    """Seconds since an arbitrary point; never goes back. The function itself: it is asked dozens of times a turn."""

    async def sleep(self, seconds: float) -> None:
        """Waits for ``seconds``."""
        await asyncio.sleep(seconds)


def time_of_day() -> datetime:
    """Returns the time that certificates are valid by, and that people are told. Nothing else rests on it."""
    return datetime.now(UTC)
