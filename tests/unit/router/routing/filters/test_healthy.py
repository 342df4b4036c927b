"""Nodes that failed a moment ago are used when there is no other."""

import pytest

from backhaul_router.core.nodes import Engine, Node
from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.filters.healthy import HealthyFilter
from backhaul_router.core.routing.target import targets_of
from tests.unit.router.routing.targets import demand, ids, target


class FakeHealth:
    """Nodes are avoided by id."""

    def __init__(self, *avoided: str) -> None:
        self.asked: list[str] = []
        self._avoided = avoided

    @property
    def all_well(self) -> bool:
        return not self._avoided

    def avoided(self, node: Node) -> bool:
        self.asked.append(node.node_id)
        return node.node_id in self._avoided


@pytest.mark.parametrize(("avoided", "kept"), [([], ["d1", "d2"]), (["d1"], ["d2"]), (["d1", "d2"], ["d1", "d2"])])
def test_nodes_to_avoid_are_used_when_there_is_no_other(avoided: list[str], kept: list[str]) -> None:
    health = HealthyFilter(FakeHealth(*avoided))
    assert ids(health.keep(demand(), Leg.DECODE, [target("d1"), target("d2")])) == kept


def test_all_ranks_of_a_node_share_one_answer() -> None:
    health = FakeHealth("d1")
    ranks = [*targets_of([target("d1", engines=(Engine("a"), Engine("b", rank=1))).node])]
    assert len(HealthyFilter(health).keep(demand(), Leg.DECODE, [*ranks, target("d2")])) == 1
    assert health.asked == ["d1", "d2"]
