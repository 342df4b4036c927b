"""What was counted of late."""

from collections import deque

_SLOTS = 20
"""Parts that a window moves on by: its length is right to a twentieth."""


class SlidingCount:
    """How much was counted within the last seconds."""

    def __init__(self, window_s: float) -> None:
        self._slot_s = window_s / _SLOTS
        self._slots: deque[list[int]] = deque()
        """Number and count of each slot that is not empty, oldest first: at most ``_SLOTS`` + 1."""
        self._total = 0

    def add(self, now: float) -> None:
        """Counts one."""
        slot = int(now / self._slot_s)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1][1] += 1
        else:
            self._drop(slot)
            self._slots.append([slot, 1])
        self._total += 1

    def total(self, now: float) -> int:
        """Returns what was counted within the window."""
        self._drop(int(now / self._slot_s))
        return self._total

    def clear(self) -> None:
        """Begins anew."""
        self._slots.clear()
        self._total = 0

    def _drop(self, slot: int) -> None:
        while self._slots and self._slots[0][0] < slot - _SLOTS:
            self._total -= self._slots.popleft()[1]
