"""Which nodes can work together."""

from typing import Any

import pytest

from backhaul_router.core.nodes import Engine, Node, NodeState, NodeTable, Role, compatible


def node(node_id: str, **fields: Any) -> Node:
    engine = Engine(
        f"{node_id}-engine",
        fields.pop("hash", "h"),
        fields.pop("weights", "w"),
        fields.pop("connector", "1"),
        True,
        fields.pop("second_chance", False),
    )
    defaults: dict[str, Any] = {
        "role": Role.PREFILL if node_id.startswith("p") else Role.DECODE,
        "agent_address": "127.0.0.1:1",
        "engine_url": f"http://{node_id}:2",
        "models": frozenset({"m"}),
        "engines": (engine,),
        "state": NodeState.READY,
    }
    return Node(node_id, **{**defaults, **fields})


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        ({}, True),
        ({"hash": "x"}, False),
        ({"hash": ""}, True),
        ({"weights": "x"}, False),
        ({"weights": ""}, True),
        ({"engines": ()}, True),
        ({"engines": node("p1").engines}, False),
        ({"engine_url": "http://p1:2", "engines": ()}, False),
    ],
)
def test_engines_exchange_unless_something_known_differs(other: dict[str, Any], fits: bool) -> None:
    assert compatible(node("p1"), node("d1", **other)) is fits


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([], "no nodes are known"),
        ([node("p1")], "no decode node is ready"),
        ([node("d1")], "no prefill node is ready"),
        ([node("p1"), node("d1", state=NodeState.NOT_READY)], "no decode node is ready"),
        ([node("p1", state=NodeState.DRAINING, retiring=True), node("d1")], "no prefill node is ready"),
        ([node("p1", state=NodeState.DRAINING), node("d1")], ""),
        (
            [node("p1"), node("d1", models=frozenset({"x"}))],
            "no prefill node can exchange blocks with a decode node of the same model",
        ),
        (
            [node("p1"), node("d1", hash="x")],
            "no prefill node can exchange blocks with a decode node of the same model",
        ),
        ([node("p1"), node("d1")], ""),
    ],
)
def test_a_usable_pair_is_needed(nodes: list[Node], problem: str) -> None:
    table = NodeTable()
    table.replace(nodes)
    assert table.problem() == problem


def test_groups_of_different_builds_never_cross() -> None:
    table = NodeTable()
    table.replace([node("p1", hash="x"), node("d1", hash="x"), node("p2", hash="y"), node("d2", hash="y")])
    assert [(p.node_id, d.node_id) for p, d in table.pairs("m")] == [("p1", "d1"), ("p2", "d2")]


def test_changes_are_applied_over_a_snapshot() -> None:
    table = NodeTable()
    table.replace([node("p1"), node("d1")])
    table.change([node("d1", state=NodeState.NOT_READY), node("d2")], ["p1"])
    assert [n.node_id for n in table.ready(Role.DECODE, "m")] == ["d2"]
    assert table.get("p1") is None
    table.replace([node("p2")])
    assert [n.node_id for n in table.ready(Role.PREFILL, "m")] == ["p2"]


def test_a_model_is_known_while_any_node_names_it() -> None:
    table = NodeTable()
    table.replace([node("d1", state=NodeState.NOT_READY, models=frozenset({"m", "lora"}))])
    assert table.serves("lora")
    assert not table.serves("x")


def test_a_node_reuses_only_with_the_connector_in_every_engine() -> None:
    assert node("p1").reuse
    assert not node("p1", connector="").reuse
    assert not node("p1", engines=()).reuse


def test_a_ready_node_that_is_listed_no_longer_serves_on_where_no_listed_one_can() -> None:
    table = NodeTable()
    table.replace([node("p1"), node("d1")])
    table.change([], ["d1"])
    assert table.problem() == ""
    assert [n.node_id for n in table.ready(Role.DECODE, "m")] == ["d1"]
    assert table.get("d1") is None

    table.change([node("d2")], [])

    assert [n.node_id for n in table.ready(Role.DECODE, "m")] == ["d2"]


def test_an_orphaned_node_ends_when_its_engine_does_not_answer_or_is_listed_again() -> None:
    table = NodeTable()
    table.replace([node("p1"), node("d1")])
    table.replace([])
    assert {n.node_id for n in table.orphans} == {"p1", "d1"}

    table.change([node("d9", engine_url="http://d1:2")], [])
    table.drop_orphan("p1")

    assert table.orphans == []


def test_a_node_that_was_not_well_is_gone_at_once() -> None:
    table = NodeTable()
    table.replace([node("d1", state=NodeState.NOT_READY)])
    table.change([], ["d1"])
    assert len(table) == 0


def test_an_engine_whose_agent_leaves_in_good_order_serves_on_where_no_ready_one_can() -> None:
    table = NodeTable()
    table.replace([node("d1", state=NodeState.DRAINING), node("d2")])
    assert [n.node_id for n in table.ready(Role.DECODE, "m")] == ["d2"]
    table.change([node("d2", state=NodeState.NOT_READY)], [])
    assert [n.node_id for n in table.ready(Role.DECODE, "m")] == ["d1"]
    table.change([], ["d1"])
    assert [n.node_id for n in table.ready(Role.DECODE, "m")] == ["d1"]


def test_a_node_that_retires_gets_no_turns_while_it_drains_nor_when_it_has_left() -> None:
    table = NodeTable()
    table.replace([node("d1", state=NodeState.DRAINING, retiring=True)])
    assert table.ready(Role.DECODE, "m") == []
    table.change([], ["d1"])
    assert len(table) == 0


def test_a_retired_node_that_is_listed_again_serves_again() -> None:
    table = NodeTable()
    table.replace([node("d1", state=NodeState.DRAINING, retiring=True)])
    table.change([], ["d1"])
    table.change([node("d1")], [])
    table.change([], ["d1"])
    assert [n.node_id for n in table.ready(Role.DECODE, "m")] == ["d1"]


@pytest.mark.parametrize(
    ("nodes", "reuses"),
    [
        ([node("p1"), node("d1")], True),
        ([node("p1", connector=""), node("d1")], False),
        ([node("p1"), node("d1", connector="")], False),
        ([node("p1"), node("d1", connector="", second_chance=True)], True),
        ([node("p1", connector=""), node("d1", connector="", second_chance=True)], True),
        ([node("p1", connector="", weights=""), node("d1", connector="", second_chance=True)], False),
        ([node("p1", connector="", weights=""), node("d1", connector="", weights="", second_chance=True)], False),
    ],
)
def test_turns_reuse_blocks_that_are_retained_or_that_a_second_chance_can_give(nodes: list[Node], reuses: bool) -> None:
    table = NodeTable()
    table.replace(nodes)
    assert table.reuses() is reuses
