"""The registry's metrics. No label is a node's, a scope's, a key's or a set's."""

from backhaul_common.metering import SHORT_S, Kind, Metric, one_of
from backhaul_registry.core.model import NodeState

_P = "backhaul.registry."


def state_label(state: NodeState) -> str:
    """Returns what the label of a node's state says."""
    return state.value.replace("-", "_")


NODES_WATCH, POINTERS_WATCH = "nodes", "pointers"
_WHAT = one_of("what", (NODES_WATCH, POINTERS_WATCH))

ETCD_DURATION = Metric(
    name="db.client.operation.duration",
    kind=Kind.HISTOGRAM,
    unit="s",
    description="Calls of etcd",
    labels=(
        one_of("db.system.name", ("etcd",)),
        one_of("db.operation.name", ("txn", "range", "list", "lease_grant", "lease_keep_alive", "lease_revoke")),
        one_of("error.type", ("", "aborted", "deadline_exceeded", "failed_precondition", "unavailable", "cancelled")),
    ),
    bounds=SHORT_S,
)
ETCD_AVAILABLE = Metric(
    name=_P + "etcd.available",
    kind=Kind.LEVEL,
    unit="1",
    description="Whether etcd answers linearizable reads (1); without it the registry is not ready",
)
ETCD_FULL = Metric(
    name=_P + "etcd.full", kind=Kind.LEVEL, unit="1", description="Whether etcd has raised the alarm NOSPACE (1)"
)
ETCD_CORRUPT = Metric(
    name=_P + "etcd.corrupt", kind=Kind.LEVEL, unit="1", description="Whether etcd has raised the alarm CORRUPT (1)"
)
WATCH_FOLLOWS = Metric(
    name=_P + "watch.follows",
    kind=Kind.LEVEL,
    unit="1",
    description="Whether a prefix of etcd is followed (1); pointers are only while somebody watches them",
    labels=(_WHAT,),
)
WATCH_BREAKS = Metric(
    name=_P + "watch.breaks",
    kind=Kind.COUNTER,
    unit="{break}",
    description="Watches of etcd that broke, and listings that failed",
    labels=(_WHAT,),
)
WATCHERS = Metric(
    name=_P + "watchers",
    kind=Kind.LEVEL,
    unit="{client}",
    description="Clients that watch: routers watch nodes",
    labels=(_WHAT,),
)
NODES = Metric(
    name=_P + "nodes",
    kind=Kind.LEVEL,
    unit="{node}",
    description="Nodes that have joined, by what their agents say of them",
    labels=(one_of("state", map(state_label, NodeState)),),
)
LOOKUPS = Metric(
    name=_P + "lookups",
    kind=Kind.COUNTER,
    unit="{lookup}",
    description="Lookups of turns that etcd answered, by whether there was a pointer",
    labels=(one_of("result", ("found", "nothing")),),
)
POINTER_CHANGES = Metric(
    name=_P + "pointer_changes",
    kind=Kind.COUNTER,
    unit="{pointer}",
    description="Pointers that agents had written and removed, durably",
    labels=(one_of("change", ("written", "removed")),),
)
PUBLISHERS = Metric(
    name=_P + "publishers",
    kind=Kind.LEVEL,
    unit="{stream}",
    description="Engines whose pointers are kept through this replica",
)
