"""From the services' messages to what checks look at."""

from backhaul.agent.v1 import diagnosis_pb2
from backhaul.registry.v1 import diagnosis_pb2 as registry_diagnosis_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_cli.core.snapshot import Agent, Clock, Engine, EngineSetup, Etcd, Nixl, Node
from backhaul_common.durations import seconds

ROLES = {registry_pb2.ROLE_PREFILL: "prefill", registry_pb2.ROLE_DECODE: "decode"}
STATES = {
    registry_pb2.NODE_STATE_READY: "ready",
    registry_pb2.NODE_STATE_NOT_READY: "not-ready",
    registry_pb2.NODE_STATE_DRAINING: "draining",
}
_NIXL = {
    diagnosis_pb2.NIXL_STATE_STARTING: Nixl.STARTING,
    diagnosis_pb2.NIXL_STATE_MISSING: Nixl.MISSING,
    diagnosis_pb2.NIXL_STATE_AVAILABLE: Nixl.AVAILABLE,
}


def node(message: registry_pb2.Node) -> Node:
    """Takes over a node's record."""
    return Node(
        node_id=message.node_id,
        role=ROLES.get(message.role, "unknown"),
        agent_address=message.agent_address,
        engine_url=message.engine_url,
        models=tuple(message.models),
        engines=tuple(map(_engine, message.engines)),
        state=STATES.get(message.state, "unknown"),
        state_reason=message.state_reason,
    )


def _engine(message: registry_pb2.Engine) -> Engine:
    return Engine(
        engine_id=message.engine_id,
        rank=message.rank,
        compatibility_hash=message.compatibility_hash,
        weights_digest=message.weights_digest,
        block_size=message.block_size,
        block_count=message.block_count,
        retention_ttl_s=seconds(message.retention_ttl),
        connector_version=message.connector_version,
        reuse=message.reuse,
        reuse_problem=message.reuse_problem,
        vllm_version=message.vllm_version,
        second_chance=message.second_chance,
        tp_size=message.tp_size,
        kv_head_count=message.kv_head_count,
    )


def agent(message: diagnosis_pb2.DiagnoseResponse, clock: Clock) -> Agent:
    """Takes over what an agent says of itself."""
    return Agent(
        clock=clock,
        nixl=_NIXL.get(message.nixl, Nixl.UNKNOWN),
        kv_events=message.kv_events,
        connector_socket=message.connector_socket,
        engine_url_problem=message.engine_url_problem,
        engines={engine.engine_id: _setup(engine) for engine in message.engines},
    )


def _setup(message: diagnosis_pb2.EngineDiagnosis) -> EngineSetup:
    return EngineSetup(
        lease_s=seconds(message.lease),
        clock_known=message.clock_known,
        clock_jump_count=message.clock_jump_count,
        connected=message.connected,
        retention_problem=message.retention_problem,
        side_channel_host=message.side_channel_host,
    )


def etcd(message: registry_diagnosis_pb2.EtcdDiagnosis) -> Etcd:
    """Takes over what a registry says of etcd."""
    return Etcd(
        endpoint=message.endpoint,
        version=message.version,
        size_bytes=message.size_bytes,
        revision=message.revision,
        compacted=message.compacted,
        full=message.full,
        corrupt=message.corrupt,
        read_s=seconds(message.read_time),
        write_s=seconds(message.write_time),
    )


def clock(theirs_s: float, *, sent_s: float, received_s: float) -> Clock:
    """Compares a service's time of day with this machine's, when it was asked and when the answer came."""
    return Clock(ahead_s=theirs_s - (sent_s + received_s) / 2, uncertainty_s=(received_s - sent_s) / 2)
