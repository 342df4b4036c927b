"""Virtual time: what is to happen next happens now."""

import heapq
from collections.abc import Callable


class Clock:
    """Seconds since the trace began, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Does something at a time, after all that was put at that time before."""
        self._count += 1
        heapq.heappush(self._due, (max(time_s, self.now), self._count, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Does something after a time."""
        self.at(self.now + delay_s, action)

    def run(self, until_s: float) -> None:
        """Lets time pass."""
        while self._due and self._due[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until_s
