"""The sets of one engine by what they are worth, least first.

What a set is worth changes with its age, and under pressure the least is asked for many times a second: so all are
looked at in turn, those that are new at once. How old the oldest look may be depends on how many there are; what the
looks cost together does not, beyond a few thousand.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable

from backhaul_node_agent.core.ordered import Ordered

MAX_PER_S = 2_500
"""Sets that are looked at again in a second: as many take 15 ms of one core."""

_FRESH_S = 1.0
"""How long a look counts at the least."""

WorthOf = Callable[[str], float]
"""What keeping a set is worth now."""


class Ranking:
    """Sets that may be released. Nothing is computed before somebody looks."""

    def __init__(self) -> None:
        self._by_worth = Ordered[tuple[float, int]]()
        """Of equal worth, those that came first go first."""
        self._numbers = itertools.count()
        self._new: dict[str, int] = {}
        """Sets that were never looked at, and their numbers."""
        self._seen: OrderedDict[str, int] = OrderedDict()
        """The others, those that were looked at longest ago first."""
        self._looked_at = -math.inf

    def add(self, set_id: str) -> None:
        """Takes in a set that may be released from now on."""
        self._new[set_id] = next(self._numbers)

    def drop(self, set_id: str) -> None:
        """Forgets a set, if it is here."""
        self._new.pop(set_id, None)
        self._seen.pop(set_id, None)
        self._by_worth.drop(set_id)

    def look(self, worth_of: WorthOf, now: float) -> None:
        """Looks at new sets, and at as many others as are due since the last time."""
        period_s = max(_FRESH_S, len(self._seen) / MAX_PER_S)
        share = min(1.0, (now - self._looked_at) / period_s)
        self._looked_at = now
        due = itertools.islice(self._seen.items(), math.ceil(share * len(self._seen)))
        for set_id, number in [*due, *self._new.items()]:
            self._seen[set_id] = number
            self._seen.move_to_end(set_id)
            self._by_worth.put(set_id, (worth_of(set_id), number))
        self._new.clear()

    def pop_least(self) -> str | None:
        """Takes out the set that is worth least; None when there is none."""
        set_id = self._by_worth.pop_least()
        if set_id is not None:
            del self._seen[set_id]
        return set_id
