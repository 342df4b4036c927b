"""A conversation stays where it is held."""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Scorer
from backhaul_router.core.routing.target import Target


class HolderScorer:
    """Rates the engine that holds the conversation above all others."""

    name = "holder"

    def score(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[float]:
        """Returns 1 for the holder, 0 for the others."""
        holder = demand.held.holder.key if demand.held else None
        return [1.0 if target.key == holder else 0.0 for target in targets]


_: type[Scorer] = HolderScorer
