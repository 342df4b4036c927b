"""A clock that the test moves."""

import asyncio


class FakeClock:
    """Time stands still until `advance`."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        """Returns the test's time."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Waits until the test has moved the time by ``seconds``."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Moves the time and lets everything run that wakes by it."""
        end = self._now + seconds
        await settle()
        while due := min((when for when, woken in self._sleepers if when <= end and not woken.done()), default=None):
            self._now = due
            ready = [woken for when, woken in self._sleepers if when <= due]
            self._sleepers = [(when, woken) for when, woken in self._sleepers if when > due]
            for woken in ready:
                if not woken.done():
                    woken.set_result(None)
            await settle()
        self._now = end
        await settle()


async def settle() -> None:
    """Lets all tasks run until they wait for something."""
    for _ in range(50):
        await asyncio.sleep(0)
