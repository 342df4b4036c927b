"""The shorter an engine's own queue, the better."""

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.reports import EngineReport
from backhaul_router.core.routing.scorers.least_waiting import LeastWaitingScorer
from tests.unit.router.routing.targets import demand, reports_of, target


def queue(length: int) -> EngineReport:
    return EngineReport(running=9, waiting=length, kv_usage=0.5)


def test_a_shorter_queue_is_better_and_an_unknown_one_average() -> None:
    scorer = LeastWaitingScorer(reports_of({"p1": queue(0), "p2": queue(4)}))
    assert scorer.score(demand(), Leg.PREFILL, [target("p1"), target("p2"), target("p3")]) == [1.0, 0.2, 1 / 3]


def test_all_are_equal_where_nothing_is_known() -> None:
    scorer = LeastWaitingScorer(reports_of({}))
    assert scorer.score(demand(), Leg.PREFILL, [target("p1"), target("p2")]) == [1.0, 1.0]
