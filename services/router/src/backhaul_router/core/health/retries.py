"""How much may be repeated: repetitions must not double the load of a pool that already fails."""

from collections.abc import Callable

from backhaul_router.core.health.windows import SlidingCount

WINDOW_S = 10.0
"""How far back turns and repetitions are counted, seconds."""

SHARE = 0.2
"""Repetitions per turn."""

SPARE = 3
"""Repetitions beyond that, so that a router with few turns may repeat at all."""


class RetryBudget:
    """Allows cold legs to be repeated as long as they are few beside the turns.

    A leg that was warm or appended, and is repeated cold, asks for nothing: it failed by a shortcut of ours.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._turns = SlidingCount(WINDOW_S)
        self._retries = SlidingCount(WINDOW_S)

    def began(self) -> None:
        """A turn began."""
        self._turns.add(self._monotonic())

    def allowed(self) -> bool:
        """Tells whether one more cold leg may be repeated now; if so, it counts as repeated."""
        now = self._monotonic()
        if self._retries.total(now) >= SHARE * self._turns.total(now) + SPARE:
            return False
        self._retries.add(now)
        return True
