"""A conversation stays where it is held."""

from backhaul_router.core.nodes import Engine
from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.scorers.holder import HolderScorer
from backhaul_router.core.routing.target import targets_of
from tests.unit.router.routing.targets import demand, target


def test_the_holder_is_above_all_others() -> None:
    asked = demand(holder=target("d2"))
    assert HolderScorer().score(asked, Leg.ALONE, [target("d1"), target("d2")]) == [0.0, 1.0]


def test_another_rank_of_its_server_is_not_the_holder() -> None:
    ranks = [*targets_of([target("d1", engines=(Engine("a"), Engine("b", rank=1))).node])]
    assert HolderScorer().score(demand(holder=ranks[1]), Leg.ALONE, ranks) == [0.0, 1.0]


def test_without_a_holder_all_are_equal() -> None:
    assert HolderScorer().score(demand(), Leg.ALONE, [target("d1"), target("d2")]) == [0.0, 0.0]
