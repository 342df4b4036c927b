"""A turn goes to nodes that serve what it names."""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Filter
from backhaul_router.core.routing.target import Target


class ModelFilter:
    """Keeps engines that serve the turn's model or adapter: a server lists its adapters under names of their own."""

    name = "model"

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns those that list the name."""
        model = demand.model
        return [target for target in targets if model in target.node.models]


_: type[Filter] = ModelFilter
