"""Engines with a long queue get nothing more."""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Filter
from backhaul_router.core.routing.reports import Reports
from backhaul_router.core.routing.target import Target


class MaxWaitingFilter:
    """Keeps engines with at most so many waiting requests. May leave none: all are busy then, and none is broken."""

    name = "max-waiting"

    def __init__(self, reports: Reports, *, limit: int) -> None:
        self._reports = reports
        self._limit = limit

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns those, and those of which nothing is known."""
        return [target for target in targets if self._waiting(target) <= self._limit]

    def _waiting(self, target: Target) -> int:
        report = self._reports.of(target.key)
        return report.waiting if report else 0


_: type[Filter] = MaxWaitingFilter
