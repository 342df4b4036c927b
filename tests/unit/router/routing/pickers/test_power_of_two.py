"""The better one of two engines that chance names gets the leg."""

import random
from collections import Counter

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.pickers.power_of_two import PowerOfTwoPicker
from backhaul_router.core.routing.plugin import Scored
from tests.unit.router.routing.targets import demand, target


def shares(**scores: float) -> Counter[str]:
    picker = PowerOfTwoPicker(random.Random(7))
    scored = [Scored(target(each), scores[each]) for each in scores]
    return Counter(picker.pick(demand(), Leg.DECODE, scored).node.node_id for _ in range(600))


def test_the_better_one_of_any_two_is_picked() -> None:
    found = shares(d1=0.1, d2=0.5, d3=0.9)
    assert found["d1"] == 0
    assert 150 < found["d2"] < 250
    assert found.total() == 600


def test_equal_ones_get_equal_shares() -> None:
    assert min(shares(d1=0.5, d2=0.5, d3=0.5).values()) > 150


def test_the_only_one_is_picked() -> None:
    assert set(shares(d1=0.0)) == {"d1"}
