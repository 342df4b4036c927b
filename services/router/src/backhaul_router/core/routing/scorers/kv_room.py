"""The more room in an engine's KV cache, the better."""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Scorer
from backhaul_router.core.routing.reports import Reports
from backhaul_router.core.routing.scorers.relative import known_or_average
from backhaul_router.core.routing.target import Target


class KvRoomScorer:
    """Rates engines by the part of their KV cache that is not in use, as their agents say every second."""

    name = "kv-room"

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def score(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[float]:
        """Returns that part; unknown ones are average."""
        return [1.0 - usage for usage in known_or_average([self._usage(target) for target in targets])]

    def _usage(self, target: Target) -> float | None:
        report = self._reports.of(target.key)
        return report.kv_usage if report else None


_: type[Scorer] = KvRoomScorer
