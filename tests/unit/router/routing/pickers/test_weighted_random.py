"""Chance gives the leg, to better engines more often."""

import random
from collections import Counter

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.pickers.weighted_random import WeightedRandomPicker
from backhaul_router.core.routing.plugin import Scored
from tests.unit.router.routing.targets import demand, target


def shares(**scores: float) -> Counter[str]:
    picker = WeightedRandomPicker(random.Random(7))
    scored = [Scored(target(each), scores[each]) for each in scores]
    return Counter(picker.pick(demand(), Leg.DECODE, scored).node.node_id for _ in range(600))


def test_shares_go_by_scores() -> None:
    found = shares(d1=0.2, d2=0.6, d3=0.0)
    assert 110 < found["d1"] < 190
    assert found["d3"] == 0


def test_where_nothing_is_worth_anything_all_are_equal() -> None:
    assert min(shares(d1=0.0, d2=0.0).values()) > 250
