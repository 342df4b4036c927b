"""The sooner an engine is done, the better."""

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.scorers.time import TimeScorer
from backhaul_router.core.routing.target import Target
from tests.unit.router.routing.targets import demand, target


class FakeTimes:
    """The time of each leg, by node."""

    def __init__(self, times: dict[tuple[str, Leg], float]) -> None:
        self._times = times

    def leg_s(self, demand: Demand, leg: Leg, target: Target) -> float:
        return self._times[target.node.node_id, leg]


def test_an_engine_that_takes_twice_as_long_is_worth_half() -> None:
    times = {("p1", Leg.READ): 0.4, ("p2", Leg.READ): 0.2, ("p1", Leg.PREFILL): 1.0, ("p2", Leg.PREFILL): 1.0}
    scorer = TimeScorer(FakeTimes(times))
    assert scorer.score(demand(), Leg.READ, [target("p1"), target("p2")]) == [0.5, 1.0]
    assert scorer.score(demand(), Leg.PREFILL, [target("p1"), target("p2")]) == [1.0, 1.0]
