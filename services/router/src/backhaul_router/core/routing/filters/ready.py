"""Work goes to ready nodes; where there are none, to those whose agent is gone or is just ending."""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Filter
from backhaul_router.core.routing.target import Target


class ReadyFilter:
    """Keeps engines of nodes that are ready and listed, as `NodeTable.ready` does.

    An engine outlives its agent. It serves on where no ready one can, unless its node retires.
    """

    name = "ready"

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns the ready ones; if there is none, those that can be used."""
        ready = [target for target in targets if target.node.ready]
        return ready or [target for target in targets if target.node.usable]


_: type[Filter] = ReadyFilter
