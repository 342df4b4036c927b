"""Which nodes a turn uses."""

from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.picking import AVOIDED_S, Load, pick_decode, pick_pair, pick_reader
from tests.unit.router.test_nodes import node


class Now:
    def __init__(self) -> None:
        self.value = 0.0

    def __call__(self) -> float:
        return self.value


def table_of(*ids: str) -> NodeTable:
    table = NodeTable()
    table.replace(node(node_id) for node_id in ids)
    return table


def test_the_least_busy_nodes_are_picked() -> None:
    table, load = table_of("p1", "p2", "d1", "d2"), Load(Now())
    with load.running(node("p1")), load.running(node("d2")):
        pair = pick_pair(table, load, "m")
    assert pair is not None
    assert pair.prefill is not None
    assert (pair.prefill.node_id, pair.decode.node_id) == ("p2", "d1")
    assert load.total == 0


def test_equal_nodes_take_turns() -> None:
    table, load = table_of("p1", "p2", "d1", "d2"), Load(Now())
    picked = [pick_decode(table, load, "m") for _ in range(6)]
    assert {n.node_id for n in picked if n} == {"d1", "d2"}


def test_a_failed_node_is_picked_only_when_it_is_the_only_one() -> None:
    table, load = table_of("p1", "d1", "d2"), Load(Now())
    for _ in range(4):
        pair = pick_pair(table, load, "m", without={"d1", "p1"})
        assert pair is not None
        assert pair.prefill is not None
        assert (pair.prefill.node_id, pair.decode.node_id) == ("p1", "d2")


def test_a_node_that_refused_is_avoided_for_a_moment() -> None:
    now = Now()
    table, load = table_of("d1", "d2"), Load(now)
    load.avoid(node("d1"))
    assert {n.node_id for _ in range(4) if (n := pick_decode(table, load, "m"))} == {"d2"}
    now.value = AVOIDED_S
    assert {n.node_id for _ in range(4) if (n := pick_decode(table, load, "m"))} == {"d1", "d2"}


def test_a_reader_has_the_connector() -> None:
    table, load = NodeTable(), Load(Now())
    table.replace([node("p1", connector=""), node("d1")])
    assert pick_reader(table, load, "m", node("d1")) is None
    assert pick_pair(table, load, "m") is not None
    table.change([node("p2")], [])
    reader = pick_reader(table, load, "m", node("d1"))
    assert reader is not None
    assert reader.node_id == "p2"


def test_without_nodes_nothing_is_picked() -> None:
    load = Load(Now())
    assert pick_pair(table_of("d1"), load, "m") is None
    assert pick_decode(table_of("p1"), load, "m") is None
    assert pick_pair(table_of("p1", "d1"), load, "another") is None
