"""Nodes that failed a moment ago, or that start slowly, are used when there is no other."""

from collections.abc import Sequence
from typing import Protocol

from backhaul_router.core.nodes import Node
from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Filter
from backhaul_router.core.routing.target import Target


class Health(Protocol):
    """What became of legs, node by node."""

    @property
    def all_well(self) -> bool:
        """Whether no node need be avoided."""
        ...

    def avoided(self, node: Node) -> bool:
        """Tells whether another node should be preferred."""
        ...


class HealthyFilter:
    """Prefers engines of nodes that need not be avoided."""

    name = "healthy"

    def __init__(self, health: Health) -> None:
        self._health = health

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns those; all of them when every one should be avoided."""
        if self._health.all_well:
            return targets
        # Once for all ranks of a node: an answer may be drawn.
        nodes = {target.node.node_id: target.node for target in targets}
        avoided = {node_id for node_id, node in nodes.items() if self._health.avoided(node)}
        if not avoided:
            return targets
        return [target for target in targets if target.node.node_id not in avoided] or targets


_: type[Filter] = HealthyFilter
