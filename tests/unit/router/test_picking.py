"""Which nodes a turn uses."""

from backhaul_router.core.engines import Failure
from backhaul_router.core.nodes import NodeTable, Role
from backhaul_router.core.picking import Load, others, pick_decode, pick_pair, pick_reader, readers
from backhaul_router.core.standing import AVOIDED_S
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
    load.standing.failed(node("d1"), Failure.REFUSED)
    assert {n.node_id for _ in range(4) if (n := pick_decode(table, load, "m"))} == {"d2"}
    now.value = AVOIDED_S
    assert {n.node_id for _ in range(4) if (n := pick_decode(table, load, "m"))} == {"d1", "d2"}


def test_after_the_avoidance_one_request_is_the_probe() -> None:
    now = Now()
    table, load = table_of("d1", "d2"), Load(now)
    load.standing.failed(node("d1"), Failure.REFUSED)
    now.value = AVOIDED_S
    picked = [n.node_id for _ in range(6) if (n := pick_decode(table, load, "m"))]
    assert picked.count("d1") == 1
    load.standing.answered(node("d1"))
    picked = [n.node_id for _ in range(4) if (n := pick_decode(table, load, "m"))]
    assert picked.count("d1") == 2


def test_equal_pairs_take_turns_too() -> None:
    table, load = table_of("p1", "p2", "d1", "d2"), Load(Now())
    pairs = [pick_pair(table, load, "m") for _ in range(4)]
    assert [pair.decode.node_id for pair in pairs if pair] == ["d1", "d2", "d1", "d2"]
    assert [pair.prefill.node_id for pair in pairs if pair and pair.prefill] == ["p1", "p2", "p1", "p2"]


def test_a_pair_that_could_not_exchange_is_split_up_over_the_others() -> None:
    table, load = table_of("p1", "p2", "d1", "d2"), Load(Now())
    load.standing.read_failed(node("p1"), node("d1"))
    pairs = [pick_pair(table, load, "m") for _ in range(12)]
    names = {(pair.prefill.node_id, pair.decode.node_id) for pair in pairs if pair and pair.prefill}
    assert {node_id for pair in names for node_id in pair} == {"p1", "p2", "d1", "d2"}
    assert ("p1", "d1") not in names


def test_a_pair_that_could_not_exchange_is_picked_when_it_is_the_only_one() -> None:
    table, load = table_of("p1", "d1"), Load(Now())
    load.standing.read_failed(node("d1"), node("p1"))
    pair = pick_pair(table, load, "m")
    assert pair is not None
    assert pair.prefill is not None


def test_a_reader_has_the_connector() -> None:
    table = NodeTable()
    table.replace([node("p1", connector=""), node("d1")])
    assert readers(table, "m", node("d1")) == []
    assert pick_pair(table, Load(Now()), "m") is not None
    table.change([node("p2")], [])
    assert [reader.node_id for reader in readers(table, "m", node("d1"))] == ["p2"]


def test_a_reader_has_not_failed_to_read_from_this_holder_a_moment_ago() -> None:
    load, able = Load(Now()), [node("p1"), node("p2")]
    load.standing.read_failed(node("p1"), node("d1"))
    assert {n.node_id for _ in range(4) if (n := pick_reader(load, able, node("d1")))} == {"p2"}
    assert {n.node_id for _ in range(4) if (n := pick_reader(load, able, node("d2")))} == {"p1", "p2"}
    load.standing.read_failed(node("p2"), node("d1"))
    assert pick_reader(load, able, node("d1")) is None


def test_others_are_ready_nodes_besides_those_tried() -> None:
    table = table_of("p1", "d1", "d2")
    assert others(table, Role.DECODE, "m", {"d1"})
    assert not others(table, Role.DECODE, "m", {"d1", "d2"})
    assert not others(table, Role.PREFILL, "m", {"p1"})


def test_without_nodes_nothing_is_picked() -> None:
    load = Load(Now())
    assert pick_pair(table_of("d1"), load, "m") is None
    assert pick_decode(table_of("p1"), load, "m") is None
    assert pick_pair(table_of("p1", "d1"), load, "another") is None
