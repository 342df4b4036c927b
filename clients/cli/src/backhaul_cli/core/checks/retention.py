"""Whether what a turn leaves is kept for long enough to be come back for."""

from collections.abc import Iterator

from backhaul_cli.core.finding import Finding, error, warning
from backhaul_cli.core.snapshot import Agent, Node, Snapshot

_HEARTBEATS = 6
"""Heartbeats in one ``kv_lease_duration`` (vLLM's `nixl/base_scheduler.py`, ``_heartbeat_interval``)."""
_MISSED = 3
"""Heartbeats after which a lease should end at the earliest."""


def renewals(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds decode engines whose block sets are gone before they can be renewed."""
    for node, agent in _asked(snapshot, "decode"):
        for setup in agent.engines.values():
            if setup.retention_problem:
                yield error(
                    "ttl-too-short",
                    node.node_id,
                    f"Blocks are gone before the next turn can have them: {setup.retention_problem}.",
                    'Set "decoder_kv_blocks_ttl": 480 and "kv_lease_duration": 180 in kv_connector_extra_config of '
                    "this decode engine and restart vLLM.",
                )


def hand_offs(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds prefill engines whose hand-offs may end before the decode engine's next heartbeats."""
    beats = [setup.lease_s / _HEARTBEATS for _, agent in _asked(snapshot, "decode") for setup in agent.engines.values()]
    if not beats:
        return
    needed_s = _MISSED * max(beats)
    for node, agent in _asked(snapshot, "prefill"):
        for setup in agent.engines.values():
            if setup.lease_s < needed_s:
                yield warning(
                    "prefill-lease-short",
                    node.node_id,
                    f"Its kv_lease_duration is {setup.lease_s:g} s, and decode engines renew only every "
                    f"{max(beats):g} s: a hand-off that waits at a busy decode engine is freed before it is read, and "
                    "the turn is computed twice.",
                    f'Set "kv_lease_duration" to {needed_s:g} or more in kv_connector_extra_config of the prefill '
                    "engine (180 on both sides is recommended) and restart vLLM.",
                )


def _asked(snapshot: Snapshot, role: str) -> Iterator[tuple[Node, Agent]]:
    for node in snapshot.nodes or ():
        if node.role == role:
            yield node, snapshot.agents.get(node.node_id, Agent())
