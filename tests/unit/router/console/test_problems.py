"""What an operator is told to look at."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from backhaul_router.core.console.problems import MAX_NAMED, Problem, Seen, Severity, pairing_of, problems
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
        "without Backhaul's connector",
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
    "block sizes differ": ([P, node("d1", block_size=32)], "block sizes differ (16 and 32 tokens)", "same vLLM"),
    "versions differ": (
        [P, node("d1", vllm_version="0.31.0", compatibility_hash="other")],
        "versions of vLLM differ (0.32.0 and 0.31.0)",
        "same vLLM",
    ),
    "weights differ": ([P, node("d1", weights_digest="other")], "weights differ", "weights"),
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
