"""Messages of registries and agents as domain values."""

from urllib.parse import urlsplit

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_common.durations import seconds
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.claims import HeldSet
from backhaul_router.core.nodes import Engine, Node, NodeState, Role
from backhaul_router.core.routing.reports import EngineReport, Retention

_ROLES = {registry_pb2.ROLE_PREFILL: Role.PREFILL, registry_pb2.ROLE_DECODE: Role.DECODE}
_STATES = {
    registry_pb2.NODE_STATE_NOT_READY: NodeState.NOT_READY,
    registry_pb2.NODE_STATE_READY: NodeState.READY,
    registry_pb2.NODE_STATE_DRAINING: NodeState.DRAINING,
}
_SET_STATES = {
    agent_pb2.BLOCK_SET_STATE_FENCED: "fenced",
    agent_pb2.BLOCK_SET_STATE_HELD: "held",
    agent_pb2.BLOCK_SET_STATE_CLAIMED: "claimed",
    agent_pb2.BLOCK_SET_STATE_RELEASING: "releasing",
}


def node_from(message: registry_pb2.Node) -> Node | None:
    """Returns a node; None for a record that cannot be used (unknown role or state, no address, no URL)."""
    role, state = _ROLES.get(message.role), _STATES.get(message.state)
    if role is None or state is None or not (message.node_id and message.agent_address and _is_url(message.engine_url)):
        return None
    engines = tuple(map(_engine_from, message.engines))
    url = message.engine_url.rstrip("/")
    models = frozenset(message.models)
    return Node(
        message.node_id,
        role,
        message.agent_address,
        url,
        models,
        engines,
        state,
        message.retiring,
        session=message.session,
        state_reason=message.state_reason,
    )


def _is_url(text: str) -> bool:
    """Tells whether a text names a host, and a port that can be: registries take any text."""
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _engine_from(message: registry_pb2.Engine) -> Engine:
    return Engine(
        engine_id=message.engine_id,
        compatibility_hash=message.compatibility_hash,
        weights_digest=message.weights_digest,
        connector_version=message.connector_version,
        reuse=message.reuse,
        second_chance=message.second_chance,
        fenced=message.fenced,
        rank=message.rank,
        block_size=message.block_size,
        block_count=message.block_count,
        tp_size=message.tp_size,
        kv_head_count=message.kv_head_count,
        reuse_problem=message.reuse_problem,
        vllm_version=message.vllm_version,
        retention_ttl_s=seconds(message.retention_ttl),
    )


def pointer_from(message: registry_pb2.BlockSetPointer) -> Pointer:
    """Returns a pointer."""
    return Pointer(
        key=message.key,
        set_id=message.set_id,
        engine_id=message.engine_id,
        node_id=message.node_id,
        token_count=message.token_count,
        digest=message.digest,
        stride=message.stride,
        identity=message.identity,
        cached=message.cached,
        traceparent=message.traceparent,
    )


def held_set_from(message: agent_pb2.BlockSet) -> HeldSet:
    """Returns a block set of a listing."""
    return HeldSet(
        set_id=message.set_id,
        engine_id=message.engine_id,
        state=_SET_STATES.get(message.state, "unknown"),
        token_count=message.token_count,
        block_count=message.block_count,
        remaining_s=seconds(message.remaining_ttl),
    )


def load_reports_from(message: agent_pb2.WatchLoadResponse) -> dict[str, EngineReport]:
    """Returns what an agent tells, by engine id."""
    return {engine.engine_id: _report_from(engine) for engine in message.engines}


def _report_from(message: agent_pb2.EngineLoad) -> EngineReport:
    return EngineReport(
        running=message.running_count,
        waiting=message.waiting_count,
        kv_usage=message.kv_usage,
        free_blocks=message.free_block_count if message.HasField("free_block_count") else None,
        retention=_retention_from(message.retention) if message.HasField("retention") else None,
    )


def _retention_from(message: agent_pb2.Retention) -> Retention:
    return Retention(message.set_count, message.block_count, message.block_limit)
