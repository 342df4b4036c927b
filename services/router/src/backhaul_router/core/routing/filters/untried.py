"""What failed a turn is not asked again for it while there is another."""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Filter
from backhaul_router.core.routing.target import Target


class UntriedFilter:
    """Prefers engines of nodes that have not failed this turn."""

    name = "untried"

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns those; all of them when every one has."""
        if not demand.tried:
            return targets
        return [target for target in targets if target.node.node_id not in demand.tried] or targets


_: type[Filter] = UntriedFilter
