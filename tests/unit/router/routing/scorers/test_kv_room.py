"""The more room in an engine's KV cache, the better."""

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.reports import EngineReport
from backhaul_router.core.routing.scorers.kv_room import KvRoomScorer
from tests.unit.router.routing.targets import demand, reports_of, target


def usage(part: float) -> EngineReport:
    return EngineReport(running=9, waiting=9, kv_usage=part)


def test_an_emptier_engine_is_better_and_an_unknown_one_average() -> None:
    scorer = KvRoomScorer(reports_of({"d1": usage(0.25), "d2": usage(0.75)}))
    assert scorer.score(demand(), Leg.DECODE, [target("d1"), target("d2"), target("d3")]) == [0.75, 0.25, 0.5]


def test_all_are_equal_where_nothing_is_known() -> None:
    scorer = KvRoomScorer(reports_of({}))
    assert scorer.score(demand(), Leg.DECODE, [target("d1"), target("d2")]) == [1.0, 1.0]
