"""Time that passes only where something waits: processes are generators, and everything happens in one order."""

import heapq
from collections.abc import Callable, Generator
from itertools import count

Process = Generator["float | Signal", None, None]
"""Yields what it waits for: so many seconds, or a signal."""


class Signal:
    """Something that happens once."""

    def __init__(self, world: "World") -> None:
        self.at: float | None = None
        """When it happened; None while it has not."""
        self._world = world
        self._waiting: list[Process] = []

    def set(self) -> None:
        """It happens now. Nothing more comes of a second time."""
        if self.at is None:
            self.at = self._world.now
            for process in self._waiting:
                self._world.resume(process)
            self._waiting.clear()

    def wake(self, process: Process) -> None:
        """Resumes a process as soon as it has happened."""
        if self.at is None:
            self._waiting.append(process)
        else:
            self._world.resume(process)


class World:
    """All that happens, and when."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def monotonic(self) -> float:
        """Returns the time, seconds."""
        return self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def start(self, process: Process) -> None:
        """Begins a process now, after all that is to happen now already."""
        self.after(0.0, lambda: self._go_on(process))

    resume = start

    def run(self) -> None:
        """Lets everything happen until nothing waits for a time any more."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _go_on(self, process: Process) -> None:
        try:
            wait = next(process)
        except StopIteration:
            return
        if isinstance(wait, Signal):
            wait.wake(process)
        else:
            self.after(wait, lambda: self._go_on(process))
