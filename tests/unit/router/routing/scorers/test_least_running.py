"""The less runs on an engine, the better."""

from collections import Counter

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.scorers.least_running import LeastRunningScorer
from backhaul_router.core.routing.target import TargetKey
from tests.unit.router.routing.targets import demand, target


class FakeRunning:
    """Legs by node."""

    def __init__(self, **legs: int) -> None:
        self._legs = Counter(legs)

    def count(self, key: TargetKey) -> int:
        return self._legs[key[0]]


def test_an_engine_with_half_as_much_to_do_is_worth_twice_as_much() -> None:
    scorer = LeastRunningScorer(FakeRunning(d1=3, d2=1))
    assert scorer.score(demand(), Leg.DECODE, [target("d1"), target("d2")]) == [0.5, 1.0]
    assert scorer.score(demand(), Leg.DECODE, [target("d1"), target("d3")]) == [0.25, 1.0]
