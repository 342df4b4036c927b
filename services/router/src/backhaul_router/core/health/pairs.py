"""Which pairs of nodes could not exchange blocks a moment ago: they do so only when there is no other pair."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from backhaul_router.core.nodes import Node

APART_S = 5.0
"""How long a pair exchanges no blocks after a failed read, seconds; doubled when one fails again after that."""

MAX_APART_S = 60.0


@dataclass(slots=True)
class _Mark:
    apart_s: float
    """How long the pair is set apart by its latest failure, seconds."""
    until: float


class Pairs:
    """Failed reads, of late."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._marks: dict[tuple[str, str], _Mark] = {}

    def forget(self, node_ids: Collection[str]) -> None:
        """Drops what is known of nodes other than these."""
        kept = {*node_ids}
        self._marks = {pair: mark for pair, mark in self._marks.items() if kept.issuperset(pair)}

    def read_failed(self, reader: Node, source: Node) -> float:
        """One node could not read the other's blocks. Returns for how long that sets the pair apart, seconds.

        0 while it is apart already: turns that failed together tell no more than one of them.
        """
        now, pair = self._monotonic(), (reader.node_id, source.node_id)
        mark = self._marks.get(pair)
        if mark is not None and now < mark.until:
            return 0.0
        again = mark is not None and now < mark.until + MAX_APART_S
        apart_s = min(2.0 * mark.apart_s, MAX_APART_S) if mark and again else APART_S
        self._marks[pair] = _Mark(apart_s, now + apart_s)
        return apart_s

    def read_worked(self, reader: Node, source: Node) -> None:
        """One node has read the other's blocks."""
        self._marks.pop((reader.node_id, source.node_id), None)

    @property
    def all_well(self) -> bool:
        """Whether no pair is set apart, nor was of late."""
        return not self._marks

    def apart(self, one: Node, other: Node) -> bool:
        """Tells whether another pair should be preferred: either of the two could not read the other's blocks."""
        return self._apart(one, other) or self._apart(other, one)

    def _apart(self, reader: Node, source: Node) -> bool:
        mark = self._marks.get((reader.node_id, source.node_id))
        return mark is not None and self._monotonic() < mark.until
