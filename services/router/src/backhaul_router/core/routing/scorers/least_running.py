"""The less this router has running on an engine, the better."""

from collections.abc import Sequence
from typing import Protocol

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Scorer
from backhaul_router.core.routing.scorers.relative import least_is_best
from backhaul_router.core.routing.target import Target, TargetKey


class Running(Protocol):
    """What runs where."""

    def count(self, key: TargetKey) -> int:
        """Returns how many legs of this router run on an engine."""
        ...


class LeastRunningScorer:
    """Rates engines by legs of this router: half as much for one that would have twice as many as the idlest one."""

    name = "least-running"

    def __init__(self, running: Running) -> None:
        self._running = running

    def score(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[float]:
        """Returns the least count divided by each one's, the leg itself counted in."""
        return least_is_best([1.0 + self._running.count(target.key) for target in targets])


_: type[Scorer] = LeastRunningScorer
