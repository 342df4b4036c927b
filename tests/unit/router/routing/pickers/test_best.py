"""The best engine gets the leg, and equal ones take turns."""

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.pickers.best import BestPicker
from backhaul_router.core.routing.plugin import Scored
from backhaul_router.core.routing.recency import Recency
from tests.unit.router.routing.targets import demand, target


class Legs:
    """Legs that are picked and sent, one after the other."""

    def __init__(self) -> None:
        self.recency = Recency()
        self._picker = BestPicker(self.recency)

    def picked(self, **scores: float) -> str:
        picked = self._picker.pick(demand(), Leg.DECODE, [Scored(target(each), scores[each]) for each in scores])
        return picked.node.node_id

    def sent(self, **scores: float) -> str:
        node_id = self.picked(**scores)
        self.recency.picked(target(node_id))
        return node_id


def test_the_best_one_is_picked() -> None:
    legs = Legs()
    assert [legs.sent(d1=0.5, d2=0.8, d3=0.7) for _ in range(3)] == ["d2"] * 3


def test_equal_ones_take_turns() -> None:
    legs = Legs()
    assert [legs.sent(d1=0.5, d2=0.5) for _ in range(4)] == ["d1", "d2", "d1", "d2"]


def test_scores_hardly_apart_are_equal() -> None:
    legs = Legs()
    assert {legs.sent(d1=0.5, d2=0.496) for _ in range(4)} == {"d1", "d2"}
    assert {legs.sent(d1=0.5, d2=0.494) for _ in range(4)} == {"d1"}


def test_a_leg_that_was_not_sent_is_nobodys_turn() -> None:
    legs = Legs()
    assert [legs.picked(d1=0.5, d2=0.5) for _ in range(3)] == ["d1"] * 3


def test_one_that_was_picked_for_its_worth_has_had_its_turn() -> None:
    legs = Legs()
    legs.sent(d1=1.0, d2=0.5)
    assert legs.picked(d1=0.5, d2=0.5) == "d2"


def test_what_is_worth_nothing_is_picked_where_nothing_is_better() -> None:
    legs = Legs()
    assert {legs.sent(d1=0.0, d2=0.0) for _ in range(2)} == {"d1", "d2"}


def test_nodes_that_left_are_forgotten_and_no_others() -> None:
    legs = Legs()
    legs.sent(d1=1.0)
    legs.sent(d2=1.0)
    legs.recency.forget({"d1"})
    assert legs.picked(d1=1.0, d2=1.0) == "d2"
