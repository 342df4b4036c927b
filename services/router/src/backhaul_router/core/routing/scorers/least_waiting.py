"""The shorter an engine's own queue, the better."""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Scorer
from backhaul_router.core.routing.reports import Reports
from backhaul_router.core.routing.scorers.relative import known_or_average, least_is_best
from backhaul_router.core.routing.target import Target


class LeastWaitingScorer:
    """Rates engines by the requests that wait there, of all routers, as their agents say every second."""

    name = "least-waiting"

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def score(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[float]:
        """Returns the shortest queue divided by each one's, the leg itself counted in; unknown ones are average."""
        counts = known_or_average([self._waiting(target) for target in targets])
        return least_is_best([1.0 + count for count in counts])

    def _waiting(self, target: Target) -> int | None:
        report = self._reports.of(target.key)
        return report.waiting if report else None


_: type[Scorer] = LeastWaitingScorer
