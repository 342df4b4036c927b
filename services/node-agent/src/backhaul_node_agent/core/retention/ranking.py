"""The sets of one engine by what they are worth, least first."""

import itertools
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

_FRESH_S = 1.0
"""How long a ranking counts: worth changes with age, and under pressure it is looked at many times a second."""

WorthOf = Callable[[str], float | None]
"""What keeping a set is worth; None for one that may not be released."""


class Ranking:
    """Ranks all sets now and then, those that come in between at once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        """Of equal worth, those that came first go first."""
        self._numbers = itertools.count()
        self._added: list[str] = []
        self._made_at = float("-inf")

    def stale(self, now: float) -> bool:
        """Tells whether all sets are to be ranked anew."""
        return now >= self._made_at + _FRESH_S

    def add(self, set_id: str, now: float) -> None:
        """Takes in a set that may be released from now on."""
        if not self.stale(now):
            self._added.append(set_id)

    def renew(self, set_ids: Iterable[str], worth_of: WorthOf, now: float) -> None:
        """Ranks all sets anew."""
        self._heap.clear()
        self._added = list(set_ids)
        self._take_added(worth_of)
        self._made_at = now

    def pop_least(self, worth_of: WorthOf) -> str | None:
        """Takes out the set that is worth least of those that may be released; None when there is none."""
        self._take_added(worth_of)
        while self._heap:
            _, _, set_id = heappop(self._heap)
            if worth_of(set_id) is not None:
                return set_id
        return None

    def _take_added(self, worth_of: WorthOf) -> None:
        for set_id in self._added:
            if (worth := worth_of(set_id)) is not None:
                heappush(self._heap, (worth, next(self._numbers), set_id))
        self._added.clear()
