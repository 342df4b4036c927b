"""Between the connector's messages, the protos, and the core's values."""

import re
from array import array
from collections.abc import Iterable

import msgspec

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_common.durations import duration
from backhaul_common.texts import clip
from backhaul_common.trace_context import checked_traceparent
from backhaul_connector import wire
from backhaul_connector.anchors import Anchors
from backhaul_node_agent.core import bounds
from backhaul_node_agent.core.block_set import BlockSet, EngineFacts
from backhaul_node_agent.core.draining import DrainStatus, Phase
from backhaul_node_agent.core.engine_loads import EngineLoad, Retention
from backhaul_node_agent.core.granting import ClaimRequest, Grant
from backhaul_node_agent.core.life import State
from backhaul_node_agent.core.node import EngineRecord, NodeRecord, Readiness
from backhaul_node_agent.core.owner import HeldSet
from backhaul_node_agent.harvest import Harvested, HarvestRequest

MAX_KEYS = 16
"""Lookup keys under which one set is published at most."""
_DIGEST_SIZE = 16
_BLOCK_IDS = "remote_block_ids"
# One pointer that the registry refuses would hold up all others of the engine.
_NAME = re.compile(wire.NAME)

_READINESS = {
    Readiness.NOT_READY: registry_pb2.NODE_STATE_NOT_READY,
    Readiness.READY: registry_pb2.NODE_STATE_READY,
    Readiness.DRAINING: registry_pb2.NODE_STATE_DRAINING,
}
_STATES = {
    State.FENCED: agent_pb2.BLOCK_SET_STATE_FENCED,
    State.HELD: agent_pb2.BLOCK_SET_STATE_HELD,
    State.CLAIMED: agent_pb2.BLOCK_SET_STATE_CLAIMED,
    State.RELEASING: agent_pb2.BLOCK_SET_STATE_RELEASING,
}
_PHASES = {Phase.DRAINING: agent_pb2.DRAIN_PHASE_DRAINING, Phase.LEFT: agent_pb2.DRAIN_PHASE_LEFT}
ROLES = {"prefill": registry_pb2.ROLE_PREFILL, "decode": registry_pb2.ROLE_DECODE}


def engine_facts(hello: wire.Hello) -> EngineFacts:
    """Takes over what a connector says of its engine.

    Raises OutOfBoundsError.
    """
    bounds.check_text(hello.engine_id, "engine_id", required=True)
    for field in ("connector_version", "vllm_version", "weights_digest", "side_channel_host"):
        bounds.check_text(getattr(hello, field), field)
    bounds.check_count(hello.rank, "rank", most=bounds.MAX_RANK)
    bounds.check_count(hello.block_size, "block_size", least=1)
    bounds.check_count(hello.block_count, "block_count", most=bounds.MAX_BLOCKS)
    bounds.check_count(hello.tp_size, "tp_size", least=1, most=bounds.MAX_TP_SIZE)
    bounds.check_count(hello.kv_head_count, "kv_head_count")
    bounds.check_count(hello.side_channel_port, "side_channel_port", least=1, most=bounds.MAX_PORT)
    bounds.check_span(hello.ttl_s, "ttl_s")
    bounds.check_span(hello.lease_s, "lease_s")
    return EngineFacts(
        engine_id=hello.engine_id,
        rank=hello.rank,
        connector_version=hello.connector_version,
        vllm_version=hello.vllm_version,
        weights_digest=hello.weights_digest,
        block_size=hello.block_size,
        block_count=hello.block_count,
        tp_size=hello.tp_size,
        ttl_s=hello.ttl_s,
        side_channel_host=hello.side_channel_host,
        side_channel_port=hello.side_channel_port,
        problem=hello.problem,
        lease_s=hello.lease_s,
        kv_head_count=hello.kv_head_count,
    )


def block_set(report: wire.BlockSetReport) -> BlockSet:
    """Takes over a reported set.

    Raises ValueError for one that cannot be managed or published.
    """
    bounds.check_request_id(report.set_id, "set_id", most_bytes=bounds.MAX_SET_ID_BYTES)
    bounds.check_instant(report.deadline, "deadline")
    bounds.check_instant(report.ended_at, "ended_at")
    bounds.check_span(report.turn_s, "turn_s")
    if not all(map(_NAME.fullmatch, (report.scope, *report.keys, *report.continues))):
        raise ValueError("a scope or key that the registry would refuse")
    for field in ("token_count", "stride", "spacing"):
        bounds.check_count(getattr(report, field), field, least=1)
    anchors = Anchors(report.identity, report.stride, report.spacing, report.token_count, report.anchors)
    # Anchors that are missing on both sides would pass for equal ones.
    if len(report.identity) != _DIGEST_SIZE or not anchors.complete:
        raise ValueError("identity or anchors of a wrong size")
    bounds.check_count(report.block_count, "block_count")
    return BlockSet(
        set_id=report.set_id,
        scope=report.scope,
        keys=tuple(dict.fromkeys(report.keys))[:MAX_KEYS],
        params={name: value for name, value in report.params.items() if name != _BLOCK_IDS},
        token_count=report.token_count,
        block_count=report.block_count,
        identity=report.identity,
        stride=report.stride,
        spacing=report.spacing,
        anchors=report.anchors,
        block_ids=_block_ids(report.params.get(_BLOCK_IDS)),
        ended_at=report.ended_at,
        turn_s=report.turn_s,
        continues=tuple(report.continues[: wire.MAX_CONTINUES]),
        traceparent=checked_traceparent(report.traceparent),
    )


def _block_ids(groups: object) -> tuple["array[int]", ...]:
    """Takes over block ids by cache group, in a tenth of the memory. Raises ValueError."""
    try:
        if not isinstance(groups, Iterable):
            raise TypeError
        return tuple(array("i", group) for group in groups)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{_BLOCK_IDS} are not lists of block numbers") from error


def pointers(held: BlockSet, *, node_id: str, engine_id: str) -> list[registry_pb2.BlockSetPointer]:
    """Returns the pointers of a set, one per lookup key."""
    return [
        registry_pb2.BlockSetPointer(
            scope=held.scope,
            key=key,
            set_id=held.set_id,
            engine_id=engine_id,
            node_id=node_id,
            token_count=held.token_count,
            digest=held.anchors[-_DIGEST_SIZE:],
            stride=held.stride,
            identity=held.identity,
            cached=held.cached,
            traceparent=held.traceparent,
        )
        for key in held.keys
    ]


def claim_request(request: agent_pb2.ClaimBlockSetRequest) -> ClaimRequest:
    """Takes over a claim."""
    return ClaimRequest(
        request_id=request.request_id,
        set_id=request.set_id,
        engine_id=request.engine_id,
        scope=request.scope,
        weights_digest=request.weights_digest,
    )


def claim_response(grant: Grant) -> agent_pb2.ClaimBlockSetResponse:
    """Answers a claim."""
    return agent_pb2.ClaimBlockSetResponse(
        kv_transfer_params_json=handle(grant).decode(),
        token_count=grant.block_set.token_count,
        ttl=duration(grant.ttl_s),
    )


def handle(grant: Grant) -> bytes:
    """Returns kv_transfer_params of the warm prefill leg as JSON."""
    held = grant.block_set
    proof = wire.HandleProof(
        scope=held.scope,
        identity=held.identity.hex(),
        stride=held.stride,
        spacing=held.spacing,
        token_count=held.token_count,
        anchors=held.anchors.hex(),
    )
    params = {
        **held.params,
        **({_BLOCK_IDS: [group.tolist() for group in held.block_ids]} if held.block_ids else {}),
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_blocks_expiry_time": grant.deadline,
        wire.PARAMS_KEY: proof,
    }
    return msgspec.json.encode(params)


def harvest_request(request: agent_pb2.HarvestBlockSetRequest) -> HarvestRequest:
    """Takes over a request for a fresh handle."""
    return HarvestRequest(
        set_id=request.set_id,
        engine_id=request.engine_id,
        scope=request.scope,
        weights_digest=request.weights_digest,
        model=request.model,
        cache_salt=request.cache_salt,
        token_ids=list(request.token_ids),
    )


def harvest_response(harvested: Harvested) -> agent_pb2.HarvestBlockSetResponse:
    """Answers with a fresh handle."""
    return agent_pb2.HarvestBlockSetResponse(
        kv_transfer_params_json=handle(harvested.grant).decode(),
        token_count=harvested.grant.block_set.token_count,
        hand_off_id=harvested.hand_off_id,
        ttl=duration(harvested.grant.ttl_s),
        computed_token_count=harvested.computed_count,
    )


def drain_response(status: DrainStatus) -> agent_pb2.DrainResponse:
    """Says how far a drain is."""
    return agent_pb2.DrainResponse(
        remaining_count=status.set_count,
        running_count=status.request_count,
        phase=_PHASES[status.phase],
        remaining_time=duration(status.remaining_s),
    )


def listed(held: HeldSet) -> agent_pb2.BlockSet:
    """Shows a set in a listing."""
    return agent_pb2.BlockSet(
        set_id=held.name.set_id,
        engine_id=held.name.engine_id,
        state=_STATES[held.state],
        token_count=held.block_set.token_count,
        block_count=held.block_set.block_count,
        remaining_ttl=duration(held.remaining_s),
        scope=held.block_set.scope,
        keys=held.block_set.keys,
    )


def load_response(loads: Iterable[EngineLoad]) -> agent_pb2.WatchLoadResponse:
    """Returns the message to a watcher."""
    return agent_pb2.WatchLoadResponse(engines=map(_engine_load, loads))


def _retention(held: Retention) -> agent_pb2.Retention:
    return agent_pb2.Retention(set_count=held.set_count, block_count=held.block_count, block_limit=held.block_limit)


def _engine_load(load: EngineLoad) -> agent_pb2.EngineLoad:
    held = load.retention
    return agent_pb2.EngineLoad(
        engine_id=load.engine_id,
        running_count=load.running_count,
        waiting_count=load.waiting_count,
        kv_usage=load.kv_usage,
        free_block_count=load.free_block_count,
        retention=None if held is None else _retention(held),
    )


def node(
    record: NodeRecord, *, node_id: str, session: str, role: str, agent_address: str, engine_url: str
) -> registry_pb2.Node:
    """Returns the node's record for the directory."""
    return registry_pb2.Node(
        node_id=node_id,
        session=session,
        role=ROLES[role],
        agent_address=agent_address,
        engine_url=engine_url,
        models=record.models,
        engines=[_engine(engine) for engine in record.engines],
        state=_READINESS[record.readiness],
        state_reason=record.reason,
        retiring=record.retiring,
    )


def refused_node(node: registry_pb2.Node, problem: str) -> registry_pb2.Node:
    """Returns the record of a node whose own one the registry refuses: not ready, and why."""
    bare = registry_pb2.Node()
    bare.CopyFrom(node)
    del bare.models[:], bare.engines[:]
    bare.state = registry_pb2.NODE_STATE_NOT_READY
    bare.state_reason = clip(f"the registry refuses the node's record: {problem}", bounds.MAX_TEXT_BYTES)
    return bare


def _engine(record: EngineRecord) -> registry_pb2.Engine:
    return registry_pb2.Engine(
        engine_id=record.engine_id,
        rank=record.place,
        compatibility_hash=record.compatibility_hash,
        weights_digest=record.weights_digest,
        block_size=record.block_size,
        block_count=record.block_count,
        retention_ttl=duration(record.retention_ttl_s),
        connector_version=record.connector_version,
        reuse=not record.reuse_problem,
        reuse_problem=record.reuse_problem,
        vllm_version=record.vllm_version,
        second_chance=record.second_chance,
        fenced=record.fenced,
        tp_size=record.tp_size,
        kv_head_count=record.kv_head_count,
    )
