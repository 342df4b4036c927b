"""Both legs of a turn go to engines that can exchange blocks."""

from collections.abc import Sequence

from backhaul_router.core.routing.compatibility import keep_compatible, partners_of
from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Filter
from backhaul_router.core.routing.target import Target


class CompatibleFilter:
    """Keeps engines that can exchange blocks with at least one of their partners.

    What reads a holder's blocks also has the connector, in the holder's version: it verifies what it reads.
    """

    name = "compatible"

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns those that can; all of them when the leg has no partners."""
        partners = partners_of(demand, leg)
        if leg is Leg.READ:
            return keep_compatible([target for target in targets if target.reuse], partners, read=True)
        return keep_compatible(targets, partners, read=False) if partners else targets


_: type[Filter] = CompatibleFilter
