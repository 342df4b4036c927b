"""Prefill legs go to prefill nodes, all others to decode nodes."""

from collections.abc import Sequence

from backhaul_router.core.nodes import Role
from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Filter
from backhaul_router.core.routing.target import Target

ROLES = {Leg.PREFILL: Role.PREFILL, Leg.READ: Role.PREFILL, Leg.DECODE: Role.DECODE, Leg.ALONE: Role.DECODE}
"""What a node must be for a leg."""


class RoleFilter:
    """Keeps engines of the role that a leg needs."""

    name = "role"

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns those of that role."""
        role = ROLES[leg]
        return [target for target in targets if target.node.role is role]


_: type[Filter] = RoleFilter
