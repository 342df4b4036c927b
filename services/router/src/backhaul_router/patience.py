"""Waits for one thing after the other, for each so long, with one timer for all of them."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar

T = TypeVar("T")


class Timer(Protocol):
    """What has been put off."""

    def cancel(self) -> None:
        """Has it never happen."""
        ...


class Loop(Protocol):
    """The event loop."""

    def time(self) -> float:
        """Returns seconds since an arbitrary point."""
        ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Calls it after ``delay`` seconds."""
        ...


class Patience:
    """Ends a wait that takes too long. Only waits count: what happens between them may take its time."""

    def __init__(self, limit_s: float, give_up: Callable[[TimeoutError], None], loop: Loop) -> None:
        """``give_up`` has the wait that is going on end with an error."""
        self._limit_s = limit_s
        self._give_up = give_up
        self._loop = loop
        self._since: float | None = None
        """Since when something is waited for."""
        self._timer: Timer | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def awaiting(self, awaitable: Awaitable[T]) -> T:
        """Returns what it comes to."""
        self._since = self._loop.time()
        try:
            return await awaitable
        finally:
            self._since = None

    def began(self) -> None:
        """Something else is waited for from now on, until `ended`."""
        self._since = self._loop.time()

    def ended(self) -> None:
        """It is there."""
        self._since = None

    def _look(self) -> None:
        """Gives up, or looks again when that could be due."""
        waited_s = 0.0 if self._since is None else self._loop.time() - self._since
        if waited_s < self._limit_s:
            self._timer = self._loop.call_later(self._limit_s - waited_s, self._look)
        else:
            self._timer = None
            self._give_up(TimeoutError(f"nothing came for {self._limit_s:g} s"))
