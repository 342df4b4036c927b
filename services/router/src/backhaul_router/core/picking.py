"""Which nodes a turn uses: the least busy ones. (A warm turn decodes on the holder of its block set.)

This is the seam for filters and scorers: a policy sees the table and the load and names a pair.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backhaul_router.core.nodes import Node, NodeTable, Role, compatible, same_weights
from backhaul_router.core.standing import Standing


@dataclass(frozen=True, slots=True)
class Pair:
    """The nodes of one turn."""

    prefill: Node | None
    """None: the decode node computes the prompt."""
    decode: Node


class Load:
    """What this router has running on each node, and what failed of late."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.standing = Standing(monotonic)
        self._running: Counter[str] = Counter()
        self._picked: dict[str, int] = {}
        """When each node was picked last, as the number of the pick."""
        self._picks = 0

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

    def least(self, nodes: Iterable[Node]) -> Node | None:
        """Returns the least busy node, those that failed a moment ago last; equal ones take turns."""
        candidates = list(nodes)
        if not candidates:
            return None
        best = min(candidates, key=self._rank)
        self._picks += 1
        self._picked[best.node_id] = self._picks
        self.standing.picked(best)
        return best

    def forget(self, node_ids: Collection[str]) -> None:
        """Drops what is known of nodes other than these."""
        self._picked = {node_id: pick for node_id, pick in self._picked.items() if node_id in node_ids}
        self.standing.forget(node_ids)

    def _rank(self, node: Node) -> tuple[bool, int, int]:
        running = self._running.get(node.node_id, 0)
        return self.standing.avoided(node), running, self._picked.get(node.node_id, 0)


def pick_pair(table: NodeTable, load: Load, model: str, *, without: Collection[str] = ()) -> Pair | None:
    """Returns a pair for a model, None when there is none.

    Nodes in ``without`` (ids) are used only for what no other node can do, pairs that failed to exchange blocks a
    moment ago only when there is no other.
    """
    every = table.pairs(model)
    pairs = [pair for pair in every if not load.standing.apart(*pair)] or every
    chosen_decode = load.least(_preferred({d.node_id: d for _, d in pairs}.values(), without))
    if chosen_decode is None:
        return None
    prefills = [p for p, d in pairs if d.node_id == chosen_decode.node_id]
    return Pair(load.least(_preferred(prefills, without)), chosen_decode)


def pick_decode(table: NodeTable, load: Load, model: str, *, without: Collection[str] = ()) -> Node | None:
    """Returns a decode node for a request that it serves alone."""
    return load.least(_preferred(table.ready(Role.DECODE, model), without))


def others(table: NodeTable, role: Role, model: str, without: Collection[str]) -> bool:
    """Tells whether a role has ready nodes besides those in ``without`` (ids)."""
    return any(node.node_id not in without for node in table.ready(role, model))


def readers(table: NodeTable, model: str, holder: Node) -> list[Node]:
    """Returns the prefill nodes that can read the holder's blocks and verify them.

    An engine without the connector would take any blocks for the prompt's.
    """
    return [node for node in table.ready(Role.PREFILL, model) if node.reuse and compatible(node, holder)]


def token_readers(table: NodeTable, model: str, holder: Node) -> list[Node]:
    """Returns the prefill nodes without the connector that can read the holder's blocks if the prompt fits for certain.

    Nobody verifies there: the weights must be known to be the same.
    """
    ready = table.ready(Role.PREFILL, model)
    return [node for node in ready if node.stock and compatible(node, holder) and same_weights(node, holder)]


def pick_reader(load: Load, nodes: Iterable[Node], holder: Node) -> Node | None:
    """Returns one of the nodes that can read the holder's blocks, None when all failed to a moment ago."""
    return load.least(node for node in nodes if not load.standing.apart(node, holder))


def _preferred(nodes: Iterable[Node], without: Collection[str]) -> list[Node]:
    candidates = list(nodes)
    return [node for node in candidates if node.node_id not in without] or candidates
