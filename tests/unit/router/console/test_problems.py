"""What an operator is told to look at."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from backhaul_router.core.console.pairing import MOST_WAYS, pairing_of
from backhaul_router.core.console.problems import MAX_NAMED, Problem, Seen, Severity, problems
from backhaul_router.core.health.circuit import BreakerState
from backhaul_router.core.nodes import Node, NodeState, NodeTable, Role
from backhaul_router.core.routing.reports import EngineReport
from tests.fakes.console import node

P, D = node("p1", Role.PREFILL), node("d1")


def table_of(*nodes: Node) -> NodeTable:
    table = NodeTable()
    table.replace(nodes)
    return table


def found(
    *nodes: Node,
    table: NodeTable | None = None,
    states: Mapping[str, BreakerState] | None = None,
    silent: tuple[str, ...] = (),
    **changes: bool,
) -> list[Problem]:
    """Returns the problems of a router that sees these nodes, all of which but the silent ones tell their load."""
    table = table or table_of(*nodes)
    seen = Seen(
        table=table,
        state=lambda node: (states or {}).get(node.node_id, BreakerState.CLOSED),
        report=lambda key: None if key[0] in silent else EngineReport(0, 0, 0.0),
        **{"registry_answers": True, **changes},
    )
    return problems(seen, pairing_of(table))


def test_there_is_none_where_all_is_well() -> None:
    assert found(P, D) == []


def test_an_empty_registry_is_told_from_one_that_does_not_answer() -> None:
    (empty,) = found()
    (away,) = found(registry_answers=False)
    assert "lists none" in empty.text
    assert "no registry answers" in away.text
    assert empty.severity is away.severity is Severity.ERROR


FAULTS = {
    "connector missing": (
        [node("p1", Role.PREFILL, connector_version="", reuse=False), D],
        "no connector has come: it is not loaded, or BACKHAUL_AGENT_SOCKET names another socket",
        "docs/engines.md",
    ),
    "bidirectional off": (
        [P, node("d1", reuse=False, reuse_problem='set "bidirectional_kv_xfer": true in kv_connector_extra_config')],
        'turns reuse nothing here: set "bidirectional_kv_xfer": true in kv_connector_extra_config',
        "docs/engines.md",
    ),
    "side channel on localhost": (
        [P, node("d1", reuse=False, reuse_problem="peers are told 'localhost': set VLLM_NIXL_SIDE_CHANNEL_HOST")],
        "peers are told 'localhost': set VLLM_NIXL_SIDE_CHANNEL_HOST",
        "docs/engines.md",
    ),
    "block sizes differ": (
        [P, node("d1", block_size=32)],
        "block sizes differ (16 tokens here, 32 there)",
        "same vLLM",
    ),
    "versions differ": (
        [P, node("d1", vllm_version="0.31.0", compatibility_hash="other")],
        "versions of vLLM differ (0.32.0 here, 0.31.0 there)",
        "same vLLM",
    ),
    "weights differ": (
        [P, node("d1", weights_digest="other")],
        "weights differ (digest weights here, other there)",
        "weights",
    ),
    "weights whose names begin alike": (
        [
            node("p1", Role.PREFILL, weights_digest="llama-3.3-70b, of May"),
            node("d1", weights_digest="llama-3.3-70b, of June"),
        ],
        "weights differ (digest llama-3.3-70b, of May here, llama-3.3-70b, of June there)",
        "weights",
    ),
    "hashes differ": (
        [P, node("d1", compatibility_hash="0123456789abcdef")],
        "compatibility hashes differ (hash here, 0123456789ab there)",
        "dtypes",
    ),
    "tensor-parallel sizes differ": (
        [node("p1", Role.PREFILL, tp_size=2), node("d1", tp_size=3)],
        "tensor-parallel sizes do not fit (2 here, 3 there)",
        "same vLLM",
    ),
    "connectors differ": (
        [P, node("d1", connector_version="0.2.0")],
        "reuse blocks with no decode node of its models: versions of the connector differ (0.1.0 here, 0.2.0 there)",
        "connector",
    ),
    "engine down": (
        [P, node("d1", state=NodeState.NOT_READY, state_reason="GET /health: connection refused")],
        "connection refused",
        "engine's log",
    ),
    "being drained": ([P, D, node("d2", state=NodeState.DRAINING, retiring=True)], "drained by an operator", "meant"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_node_and_what_to_do(fault: str) -> None:
    nodes, text, remedy = FAULTS[fault]
    named = [one for one in found(*nodes) if text in one.text and remedy in one.remedy]
    assert len(named) == 1
    assert named[0].nodes


def test_an_agent_that_is_gone_is_named() -> None:
    table = table_of(P, D, node("d2"))
    table.change((), ["d2"])
    (problem,) = found(table=table)
    assert ("agent is gone" in problem.text, problem.nodes) == (True, ("d2",))


@pytest.mark.parametrize("state", [BreakerState.OPEN, BreakerState.HALF_OPEN])
def test_an_engine_that_fails_requests_is_named(state: BreakerState) -> None:
    (problem,) = found(P, D, states={"d1": state})
    assert ("ejected" in problem.text, problem.nodes) == (True, ("d1",))


def test_an_agent_that_tells_no_load_is_named_once_the_router_has_run_for_a_while() -> None:
    (problem,) = found(P, D, silent=("d1",))
    assert (problem.severity, problem.nodes) == (Severity.WARNING, ("d1",))
    assert found(P, D, silent=("d1",), settled=False) == []


def test_the_same_problem_on_many_nodes_is_told_once() -> None:
    many = [node(f"d{number}", reuse=False, reuse_problem="odd: mend it") for number in range(50)]
    (problem,) = [one for one in found(P, *many) if "odd" in one.text]
    assert (problem.node_count, len(problem.nodes), problem.text.endswith("odd: mend it")) == (50, MAX_NAMED, True)


def test_errors_come_before_warnings() -> None:
    severities = [one.severity for one in found(P, replace(D, state=NodeState.NOT_READY), node("d2"), silent=("p1",))]
    assert severities == sorted(severities, key=lambda severity: severity is not Severity.ERROR)
    assert {*severities} == {*Severity}


def apart(*nodes: Node) -> dict[tuple[str, ...], str]:
    """Returns what is said of nodes that work with none of the other role."""
    return {one.nodes: one.text for one in found(*nodes) if "with no" in one.text}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"block_size": 64},
            "can exchange blocks with no prefill node of its models: block sizes differ (64 tokens here, ",
        ),
        (
            {"connector_version": "0.2.0"},
            "can reuse blocks with no prefill node of its models: versions of the connector ",
        ),
    ],
)
def test_a_decode_node_that_fits_no_prefill_node_is_named_beside_one_that_does(
    changes: Mapping[str, object], text: str
) -> None:
    odd = node("d2", Role.DECODE, **changes)
    (said,) = apart(P, D, odd).items()
    assert (said[0], said[1].startswith(text)) == (("d2",), True)
    # Where there is no other decode node, the prefill node says it.
    assert [*apart(P, odd)] == [("p1",)]


def test_a_node_that_fits_one_of_the_other_role_may_differ_from_the_rest() -> None:
    assert apart(P, D, node("p2", Role.PREFILL, block_size=64), node("d2", block_size=64)) == {}


def test_other_models_an_agent_that_is_gone_and_the_same_server_in_both_roles_are_no_partners() -> None:
    others = frozenset({"other"})
    assert apart(P, D, node("d2", models=others, block_size=64)) == {}
    both = [
        node(name, role, engine_url="http://both:8200") for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE))
    ]
    assert apart(*both) == {}
    assert {*apart(*both, node("d2", block_size=64))} == {("p1",)}


def test_an_engine_without_reuse_is_not_said_to_have_another_connector_too() -> None:
    assert apart(P, node("d1", connector_version="0.2.0", reuse=False, reuse_problem="odd")) == {}


def test_many_differences_are_counted_and_not_all_named() -> None:
    many = [node(f"d{number}", weights_digest=f"digest-{number}") for number in range(MOST_WAYS + 2)]
    (text,) = apart(P, *many).values()
    assert (text.count("weights differ"), text.endswith("; and 2 more")) == (MOST_WAYS, True)
