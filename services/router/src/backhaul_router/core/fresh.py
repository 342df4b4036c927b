"""Keys of turns that ended a moment ago: the next turn can be faster than the publish."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

FRESH_S = 3.0
"""How long after a turn's end its pointers may still be on their way, seconds."""

MAX_FRESH = 10_000
"""Keys remembered; beyond that the oldest are forgotten, which costs those turns only the wait."""


class FreshKeys:
    """Remembers which keys ought to be findable soon."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()

    def note(self, scope: str, key: str) -> None:
        """A turn that carries this label is streaming, or has just ended."""
        now = self._monotonic()
        self._until[scope, key] = now + FRESH_S
        self._until.move_to_end((scope, key))
        while self._until and (len(self._until) > MAX_FRESH or next(iter(self._until.values())) <= now):
            self._until.popitem(last=False)

    def forget(self, scope: str, key: str) -> None:
        """Nothing will be published under this key, or it has been waited for in vain."""
        self._until.pop((scope, key), None)

    def missing(self, scope: str, keys: Sequence[str], found: Collection[str]) -> str:
        """Returns the first of ``keys``, best first, that ought to be findable; empty when a better one is ``found``.

        What comes after one that is found need not be there any more: the newer turn has superseded it.
        """
        now = self._monotonic()
        known = (key for key in keys if key in found or self._until.get((scope, key), now) > now)
        first = next(known, "")
        return "" if first in found else first
