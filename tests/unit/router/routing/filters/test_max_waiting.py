"""Engines with a long queue get nothing more."""

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.filters.max_waiting import MaxWaitingFilter
from backhaul_router.core.routing.reports import EngineReport
from tests.unit.router.routing.targets import demand, ids, reports_of, target


def queue(length: int) -> EngineReport:
    return EngineReport(running=9, waiting=length, kv_usage=0.5)


def test_engines_with_a_longer_queue_than_allowed_get_nothing_more() -> None:
    reports = reports_of({"d1": queue(3), "d2": queue(4)})
    kept = MaxWaitingFilter(reports, limit=3).keep(demand(), Leg.DECODE, [target("d1"), target("d2"), target("d3")])
    assert ids(kept) == ["d1", "d3"]


def test_none_is_left_when_all_are_busy() -> None:
    assert not MaxWaitingFilter(reports_of({"d1": queue(1)}), limit=0).keep(demand(), Leg.DECODE, [target("d1")])
