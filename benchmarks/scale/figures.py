"""What counts come to: per turn, and per second of a node, beside those of the first cluster."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from benchmarks.scale.agents import AGENT, AGENT_IDLE
from benchmarks.scale.cluster import PLANNER, REGISTRY, REGISTRY_IDLE, ROUTER, ROUTER_IDLE
from benchmarks.scale.play import Counts

_US = 1e6

Figure = Callable[[Counts], float]


def _cpu(account: str) -> Figure:
    return lambda counts: _US * counts.cpu_s.get(account, 0.0)


BY_TURN: Mapping[str, Figure] = {
    "router_us": _cpu(ROUTER),
    "planner_us": _cpu(PLANNER),
    "registry_us": _cpu(REGISTRY),
    "agents_us": _cpu(AGENT),
    "registry_calls": lambda counts: counts.calls["FindBlockSets"] + counts.calls["PublishBlockSets"],
    "claims": lambda counts: counts.calls.get("ClaimBlockSet", 0),
    "grpc_bytes": lambda counts: sum(
        counts.sent_bytes.get(name, 0) for name in ("FindBlockSets", "PublishBlockSets", "ClaimBlockSet")
    ),
    "etcd_requests": lambda counts: counts.etcd_requests["find"] + counts.etcd_requests["write"],
    "etcd_written_bytes": lambda counts: counts.etcd_written_bytes,
}
"""What turns cost, of all turns; the planner is part of the router."""

BY_NODE_SECOND: Mapping[str, Figure] = {
    "router_us": _cpu(ROUTER_IDLE),
    "registry_us": _cpu(REGISTRY_IDLE),
    "agents_us": _cpu(AGENT_IDLE),
    "etcd_requests": lambda counts: counts.etcd_requests.get("look", 0) + counts.etcd_requests.get("lease", 0),
}
"""What nodes cost as time passes, turns or none, of all nodes and all seconds."""


def figures_of(rounds: Sequence[Counts]) -> dict[str, dict[str, float]]:
    """Returns the medians of several rounds on one cluster."""
    return {
        "by_turn": {
            name: median(figure(counts) / counts.turns for counts in rounds) for name, figure in BY_TURN.items()
        },
        "by_node_second": {
            name: median(figure(counts) / _node_seconds(counts) for counts in rounds)
            for name, figure in BY_NODE_SECOND.items()
        },
    }


def ratios(figures: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
    """Returns figures over those of the first cluster; 1 where both are 0."""
    return {name: value / first[name] if first[name] else 1.0 for name, value in figures.items()}


def reuse_share(counts: Counts) -> float:
    """Returns the share of turns that reused what was held."""
    return sum(counts.routes.get(route, 0) for route in ("warm", "append")) / counts.turns


def _node_seconds(counts: Counts) -> float:
    return (counts.prefill + counts.decode) * counts.virtual_s
