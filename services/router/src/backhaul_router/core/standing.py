"""Which nodes, and which pairs of nodes, failed a moment ago: they are used when there is no other."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from backhaul_router.core.engines import Failure
from backhaul_router.core.nodes import Node

AVOIDED_S = 2.0
"""How long a node that failed is used only when there is no other, seconds. After it one request is the probe."""

FAULTS_IN_A_ROW = 3
"""Answers 500 by which a node counts as failed. Fewer may be the requests' own fault."""

APART_S = 5.0
"""How long a pair exchanges no blocks after a failed read, seconds; doubled with each further one."""

MAX_APART_S = 60.0

_AT_ONCE = frozenset(
    {Failure.REFUSED, Failure.DISCONNECTED, Failure.TIMEOUT, Failure.UNAVAILABLE, Failure.GONE},
)
"""Failures that no request can bring about."""


@dataclass(slots=True)
class _Mark:
    failures: int = 0
    until: float = 0.0
    """End of the avoidance; 0 for none yet."""


class Standing:
    """What went wrong, of late. Errors that blame the client and clients that leave are not told to it."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._nodes: dict[str, _Mark] = {}
        self._pairs: dict[tuple[str, str], _Mark] = {}

    def forget(self, node_ids: Collection[str]) -> None:
        """Drops what is known of nodes other than these."""
        self._nodes = {node_id: mark for node_id, mark in self._nodes.items() if node_id in node_ids}
        self._pairs = {pair: mark for pair, mark in self._pairs.items() if {*pair} <= {*node_ids}}

    # Nodes

    def failed(self, node: Node, failure: Failure) -> None:
        """A leg on this node failed."""
        mark = self._nodes.setdefault(node.node_id, _Mark())
        mark.failures += 1
        if failure in _AT_ONCE or mark.failures >= FAULTS_IN_A_ROW:
            mark.until = self._monotonic() + AVOIDED_S

    def answered(self, node: Node) -> None:
        """A leg on this node was answered, if only with an error that blames the client."""
        self._nodes.pop(node.node_id, None)

    def avoided(self, node: Node) -> bool:
        """Tells whether another node should be preferred."""
        mark = self._nodes.get(node.node_id)
        return mark is not None and mark.until > self._monotonic()

    def picked(self, node: Node) -> None:
        """A request goes to this node. After an avoidance it is a probe: until it is answered, others stay away."""
        mark = self._nodes.get(node.node_id)
        if mark is not None and mark.until:
            mark.until = self._monotonic() + AVOIDED_S

    # Pairs

    def read_failed(self, reader: Node, source: Node) -> float:
        """One node could not read the other's blocks. Returns for how long the pair is set apart, seconds."""
        now = self._monotonic()
        mark = self._pairs.get((reader.node_id, source.node_id))
        if mark is None or mark.until + MAX_APART_S <= now:
            mark = self._pairs[reader.node_id, source.node_id] = _Mark()
        apart_s = min(APART_S * 2.0 ** min(mark.failures, 10), MAX_APART_S)
        mark.failures += 1
        mark.until = now + apart_s
        return apart_s

    def read_worked(self, reader: Node, source: Node) -> None:
        """One node has read the other's blocks."""
        self._pairs.pop((reader.node_id, source.node_id), None)

    def apart(self, one: Node, other: Node) -> bool:
        """Tells whether another pair should be preferred: either of the two could not read the other's blocks."""
        now = self._monotonic()
        marks = (self._pairs.get(pair) for pair in ((one.node_id, other.node_id), (other.node_id, one.node_id)))
        return any(mark is not None and mark.until > now for mark in marks)
