"""Which nodes a turn uses: the least busy ones. (A warm turn decodes on the holder of its block set.)

This is the seam for filters and scorers: a policy sees the table and the load and names a pair.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backhaul_router.core.nodes import Node, NodeTable, Role, compatible

AVOIDED_S = 2.0
"""How long a node that refused a connection is used only when there is no other, seconds."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The nodes of one turn."""

    prefill: Node | None
    """None: the decode node computes the prompt."""
    decode: Node


class Load:
    """What this router has running on each node, and which nodes refused connections a moment ago."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._running: Counter[str] = Counter()
        self._avoided: dict[str, float] = {}
        self._picked = 0

    @contextmanager
    def running(self, node: Node) -> Iterator[None]:
        """Counts one leg on a node."""
        self._running[node.node_id] += 1
        try:
            yield
        finally:
            self._running[node.node_id] -= 1
            if not self._running[node.node_id]:
                del self._running[node.node_id]

    @property
    def total(self) -> int:
        """Legs running on all nodes."""
        return self._running.total()

    def avoid(self, node: Node) -> None:
        """Notes that a node refused a connection."""
        self._avoided[node.node_id] = self._monotonic() + AVOIDED_S

    def least(self, nodes: Iterable[Node]) -> Node | None:
        """Returns the least busy node, those that refused a connection last; equal ones take turns."""
        candidates = list(nodes)
        if not candidates:
            return None
        self._picked += 1
        shift = self._picked % len(candidates)
        return min(candidates[shift:] + candidates[:shift], key=lambda node: (self._is_avoided(node), self._of(node)))

    def _of(self, node: Node) -> int:
        return self._running.get(node.node_id, 0)

    def _is_avoided(self, node: Node) -> bool:
        until = self._avoided.get(node.node_id)
        if until is not None and until <= self._monotonic():
            del self._avoided[node.node_id]
            return False
        return until is not None


def pick_pair(table: NodeTable, load: Load, model: str, *, without: Collection[str] = ()) -> Pair | None:
    """Returns a pair for a model, None when there is none.

    Nodes in ``without`` (ids) are used only for what no other node can do.
    """
    pairs = table.pairs(model)
    chosen_decode = load.least(_preferred({d.node_id: d for _, d in pairs}.values(), without))
    if chosen_decode is None:
        return None
    prefills = [p for p, d in pairs if d.node_id == chosen_decode.node_id]
    return Pair(load.least(_preferred(prefills, without)), chosen_decode)


def pick_decode(table: NodeTable, load: Load, model: str, *, without: Collection[str] = ()) -> Node | None:
    """Returns a decode node for a request that it serves alone."""
    return load.least(_preferred(table.ready(Role.DECODE, model), without))


def pick_reader(table: NodeTable, load: Load, model: str, holder: Node) -> Node | None:
    """Returns a prefill node that can read the holder's blocks and verifies them, None when there is none.

    An engine without the connector would take any blocks for the prompt's.
    """
    return load.least(node for node in table.ready(Role.PREFILL, model) if node.reuse and compatible(node, holder))


def _preferred(nodes: Iterable[Node], without: Collection[str]) -> list[Node]:
    candidates = list(nodes)
    return [node for node in candidates if node.node_id not in without] or candidates
