"""Work goes to ready nodes, and else to what still runs."""

import pytest

from backhaul_router.core.nodes import NodeState, NodeTable, Role
from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.filters.ready import ReadyFilter
from backhaul_router.core.routing.target import Target, targets_of
from tests.unit.router.routing.targets import demand, ids, target

READY = target("d1")
ENDING = target("d2", state=NodeState.DRAINING)
ORPHANED = target("d3", orphaned=True)
RETIRING = target("d4", state=NodeState.DRAINING, retiring=True)
STARTING = target("d5", state=NodeState.NOT_READY)


@pytest.mark.parametrize(
    ("targets", "kept"),
    [
        ([READY, ENDING, ORPHANED, RETIRING, STARTING], ["d1"]),
        ([ENDING, ORPHANED, RETIRING, STARTING], ["d2", "d3"]),
        ([RETIRING, STARTING], []),
    ],
)
def test_engines_without_an_agent_serve_on_where_no_ready_one_can(targets: list[Target], kept: list[str]) -> None:
    assert ids(ReadyFilter().keep(demand(), Leg.DECODE, targets)) == kept


@pytest.mark.parametrize("gone", [[], ["d1"], ["d1", "d6"]])
def test_the_table_of_nodes_says_the_same(gone: list[str]) -> None:
    table = NodeTable()
    table.replace(each.node for each in (READY, ENDING, RETIRING, STARTING, target("d6")))
    table.change([], gone)
    assert ids(ReadyFilter().keep(demand(), Leg.DECODE, [*targets_of(table)])) == [
        node.node_id for node in table.ready(Role.DECODE, "m")
    ]
