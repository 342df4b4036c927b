"""The sooner an engine is estimated to be done with a leg, the better."""

from collections.abc import Sequence
from typing import Protocol

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Scorer
from backhaul_router.core.routing.scorers.relative import least_is_best
from backhaul_router.core.routing.target import Target


class Times(Protocol):
    """What legs are estimated to take."""

    def leg_s(self, demand: Demand, leg: Leg, target: Target) -> float:
        """Returns wait and work of a leg at an engine, seconds."""
        ...


class TimeScorer:
    """Rates engines by estimated time: half as much for one that takes twice as long as the fastest one."""

    name = "time"

    def __init__(self, times: Times) -> None:
        self._times = times

    def score(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[float]:
        """Returns the least time divided by each one's."""
        return least_is_best([self._times.leg_s(demand, leg, target) for target in targets])


_: type[Scorer] = TimeScorer
