"""What connectors and agents say of an engine without reuse, as doctor reads it: the words are theirs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from backhaul_cli.core.doctor import diagnose
from backhaul_cli.core.snapshot import EngineSetup
from backhaul_connector.engine import reuse_problem
from backhaul_node_agent.core.node import (
    NodeRecord,
    ServerFacts,
    SideChannelFacts,
    node_record,
)
from backhaul_node_agent.core.retention import renewing
from tests.fakes.cluster_seen import agent, cluster, engine, node
from tests.unit.node_agent.owned import LIMITS, facts

WELL = {"bidirectional_kv_xfer": True, "kv_lease_duration": 180}


def connector_says(extra: dict[str, Any], *, policy: str = "fail", socket: str = "/run/d.sock") -> str:
    transfer = SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy=policy)
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    return reuse_problem(config, socket)


def agent_says(*, host: str = "10.0.0.2", weights: str = "weights", connected: bool = True) -> str:
    known = facts(weights=weights)
    record: NodeRecord = node_record(
        server=ServerFacts(healthy=True, models=("m",)),
        engines=[replace(known, side_channel_host=host)],
        side_channels={0: SideChannelFacts(known.engine_id, "hash", 32, 100)},
        connected=[known.engine_id] if connected else [],
        advertised_host="10.0.0.2",
        purging=False,
    )
    return record.engines[0].reuse_problem


@pytest.mark.parametrize(
    ("said", "check"),
    [
        (connector_says({**WELL, "bidirectional_kv_xfer": False}), "bidirectional-off"),
        (connector_says(WELL, policy="recompute"), "load-failure-policy"),
        (connector_says({**WELL, "kv_lease_duration": 10}), "lease-too-short"),
        (connector_says(WELL, socket=""), "no-agent-socket"),
        (agent_says(host="localhost"), "side-channel-local"),
        (agent_says(weights=""), "weights-unknown"),
        (agent_says(connected=False), "connector-away"),
    ],
    ids=lambda value: value if "-" in value and " " not in value else "",
)
def test_each_reason_is_read_as_what_it_is(said: str, check: str) -> None:
    lacking = node("decode-1", engines=(engine("decode-1", reuse=False, reuse_problem=said),))
    (found,) = diagnose(cluster(node("prefill-1"), lacking))
    assert found.check == check
    assert said in found.what


def test_a_ttl_that_the_agent_finds_too_short_is_told_with_its_figures() -> None:
    known = facts()
    problem = renewing.problem(replace(known, ttl_s=3.0), LIMITS)
    seen = cluster(agents={"decode-1": agent("decode-1", EngineSetup(retention_problem=problem))})
    (found,) = diagnose(seen)
    assert (found.check, "decoder_kv_blocks_ttl is 3 s" in found.what) == ("ttl-too-short", True)
