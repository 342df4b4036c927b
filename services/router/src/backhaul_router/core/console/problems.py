"""What an operator should look at: faults that keep turns from being served, or from reusing anything."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from backhaul_router.core.health.circuit import BreakerState
from backhaul_router.core.nodes import Engine, Node, NodeState, NodeTable
from backhaul_router.core.routing.reports import EngineReport

MAX_NAMED = 20
"""Nodes that a problem names; of more it says how many there are."""

_NO_CONNECTOR = "no connector has come: it is not loaded, or BACKHAUL_AGENT_SOCKET names another socket"
_AGENT_SILENT = "tells nothing of its engines' load"


class Severity(Enum):
    """How bad it is."""

    ERROR = "error"
    """Turns fail, or nothing can be reused."""
    WARNING = "warning"
    """Something works less well than it could."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, wherever it is."""

    severity: Severity
    text: str
    remedy: str
    nodes: tuple[str, ...] = ()
    """Ids of those that it concerns, at most 20."""
    node_count: int = 0
    """All that it concerns."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a router sees of its nodes now."""

    table: NodeTable
    state: Callable[[Node], BreakerState]
    report: Callable[[tuple[str, str]], EngineReport | None]
    registry_answers: bool
    settled: bool = True
    """Whether it has run long enough for all agents to have told their load."""


Found = tuple[Severity, str, str, str]
"""Severity, text, remedy and the node that it was seen on."""


def problems(seen: Seen, pairing: Iterable[Found]) -> list[Problem]:
    """Returns all problems, errors first; the same one on several nodes counts once. ``pairing``: of `pairing_of`."""
    grouped: dict[tuple[Severity, str, str], list[str]] = {}
    for severity, text, remedy, node_id in _found(seen, pairing):
        grouped.setdefault((severity, text, remedy), []).append(node_id)
    found = [
        Problem(*what, tuple(nodes[:MAX_NAMED]) if nodes[0] else (), len(nodes) if nodes[0] else 0)
        for what, nodes in grouped.items()
    ]
    return sorted(found, key=lambda problem: problem.severity is not Severity.ERROR)


def _found(seen: Seen, pairing: Iterable[Found]) -> Iterator[Found]:
    yield from _whole(seen)
    yield from pairing
    for node in seen.table:
        yield from _node(node, seen)


def _whole(seen: Seen) -> Iterator[Found]:
    if not seen.registry_answers:
        yield (
            Severity.ERROR,
            "no registry answers: nodes are shown as they were listed last, and turns find nothing to reuse",
            "see that a registry runs at an address of the router's --registry, and that its etcd answers",
            "",
        )
    elif not len(seen.table):
        yield (
            Severity.ERROR,
            "no nodes are known: the registry lists none",
            "start a node agent beside each vLLM server, with this cluster's registry (README, Put it in front of your "
            "own engines); its log says why it does not join",
            "",
        )


def _node(node: Node, seen: Seen) -> Iterator[Found]:
    if node.orphaned:
        yield (
            Severity.WARNING,
            "its agent is gone: the engine serves turns where no other can, without reuse",
            "start the node's agent again",
            node.node_id,
        )
        return
    if node.state is NodeState.NOT_READY:
        reason = node.state_reason or "the agent does not say why"
        yield Severity.ERROR, f"not ready: {reason}", "see the engine's log, and the agent's", node.node_id
    if node.state is NodeState.DRAINING:
        text = "being drained by an operator" if node.retiring else "its agent is ending"
        yield Severity.WARNING, text, "nothing, if this is meant", node.node_id
    if seen.state(node) in (BreakerState.OPEN, BreakerState.HALF_OPEN):
        text = "ejected: its engine failed requests, and is used only where there is no other"
        yield Severity.ERROR, text, "see the engine's log; it is tried again by itself", node.node_id
    for engine in node.engines:
        yield from _engine(node, engine, seen)


def _engine(node: Node, engine: Engine, seen: Seen) -> Iterator[Found]:
    if not engine.reuse or not engine.connector_version:
        text = f"turns reuse nothing here: {engine.reuse_problem or _NO_CONNECTOR}"
        yield (
            Severity.ERROR,
            text,
            "docs/engines.md has all of an engine's settings, under See whether it works",
            node.node_id,
        )
    if seen.report((node.node_id, engine.engine_id)) is None and node.state is NodeState.READY and seen.settled:
        yield (
            Severity.WARNING,
            _AGENT_SILENT,
            "see that this router reaches the agent's address, that the engine's /metrics are on, and that the agent "
            "is not older than the router",
            node.node_id,
        )
