"""Between the messages of the API and the registry's own values.

Conversion is of form only, and raises InvalidArgumentError for enum values that mean nothing; `core.rules` judges the
content.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.durations import duration, seconds
from backhaul_common.errors import InvalidArgumentError
from backhaul_registry.core.feed import Change, Opening
from backhaul_registry.core.model import Engine, Node, NodeState, Pointer, PointerId, Role

NODES_PER_MESSAGE = 200
"""Nodes of one message of a watch: 12.5 MiB at most."""

POINTERS_PER_MESSAGE = 5_000
"""Pointers of one message of a watch: 9 MiB at most, 1 MiB as a rule."""

T = TypeVar("T")

_MORE: dict[str, Any] = {"more": True}

_ROLES = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_STATES = {
    NodeState.NOT_READY: pb.NODE_STATE_NOT_READY,
    NodeState.READY: pb.NODE_STATE_READY,
    NodeState.DRAINING: pb.NODE_STATE_DRAINING,
}
_ROLES_BACK = {value: role for role, value in _ROLES.items()}
_STATES_BACK = {value: state for state, value in _STATES.items()}


def pointer_to_proto(pointer: Pointer) -> pb.BlockSetPointer:
    """Returns a whole pointer."""
    message = facts_to_proto(pointer)
    message.scope, message.key, message.set_id = pointer.scope, pointer.key, pointer.set_id
    return message


def facts_to_proto(pointer: Pointer) -> pb.BlockSetPointer:
    """Returns a pointer of which all but the id is set."""
    return pb.BlockSetPointer(
        engine_id=pointer.engine_id,
        node_id=pointer.node_id,
        token_count=pointer.token_count,
        digest=pointer.digest,
        stride=pointer.stride,
        identity=pointer.identity,
        cached=pointer.cached,
        traceparent=pointer.traceparent,
    )


def pointer_id_to_proto(pointer: PointerId) -> pb.BlockSetPointer:
    """Returns a pointer of which only the id is set."""
    return pb.BlockSetPointer(scope=pointer.scope, key=pointer.key, set_id=pointer.set_id)


def pointer_from_proto(message: pb.BlockSetPointer) -> Pointer:
    """Takes a whole pointer."""
    return facts_from_proto(message, scope=message.scope, key=message.key, set_id=message.set_id)


def facts_from_proto(message: pb.BlockSetPointer, *, scope: str, key: str, set_id: str) -> Pointer:
    """Takes all but the id of a pointer, which is known otherwise."""
    return Pointer(
        # Thousands are kept, of few scopes.
        scope=sys.intern(scope),
        key=key,
        set_id=set_id,
        engine_id=message.engine_id,
        node_id=message.node_id,
        token_count=message.token_count,
        digest=message.digest,
        stride=message.stride,
        identity=message.identity,
        cached=message.cached,
        traceparent=message.traceparent,
    )


def pointer_id_from_proto(message: pb.BlockSetPointer) -> PointerId:
    """Takes the id of a pointer."""
    return PointerId(message.scope, message.key, message.set_id)


def node_to_proto(node: Node) -> pb.Node:
    """Returns a node."""
    return pb.Node(
        node_id=node.node_id,
        session=node.session,
        role=_ROLES[node.role],
        agent_address=node.agent_address,
        engine_url=node.engine_url,
        models=node.models,
        engines=map(_engine_to_proto, node.engines),
        state=_STATES[node.state],
        state_reason=node.state_reason,
        retiring=node.retiring,
    )


def node_from_proto(message: pb.Node) -> Node:
    """Takes a node. Raises InvalidArgumentError (ENUM_INVALID)."""
    if message.role not in _ROLES_BACK or message.state not in _STATES_BACK:
        raise InvalidArgumentError("ENUM_INVALID", "role and state must have one of their named values")
    return Node(
        node_id=message.node_id,
        session=message.session,
        role=_ROLES_BACK[message.role],
        agent_address=message.agent_address,
        engine_url=message.engine_url,
        models=tuple(message.models),
        engines=tuple(map(_engine_from_proto, message.engines)),
        state=_STATES_BACK[message.state],
        state_reason=message.state_reason,
        retiring=message.retiring,
    )


def nodes_opening(opening: Opening[Node]) -> Iterator[pb.WatchNodesResponse]:
    """Yields the first messages of a watch of nodes."""
    where: dict[str, Any] = {"revision": opening.revision, "digest": opening.digest}
    if opening.snapshot is None:
        yield pb.WatchNodesResponse(resumed=pb.WatchNodesResponse.Resumed(), **where)
        return
    nodes = [node for _, node in sorted(opening.snapshot.items())]
    for part, last in _parts(nodes, NODES_PER_MESSAGE):
        snapshot = pb.WatchNodesResponse.Snapshot(nodes=map(node_to_proto, part))
        yield pb.WatchNodesResponse(snapshot=snapshot, **(where if last else _MORE))


def nodes_change(change: Change[Node]) -> Iterator[pb.WatchNodesResponse]:
    """Yields the later messages of a watch of nodes; a sign of life for a change without content."""
    where: dict[str, Any] = {"revision": change.revision, "digest": change.digest}
    steps = [*change.upserts.values(), *(node.node_id for node in change.removals.values())]
    if not steps:
        yield pb.WatchNodesResponse(**where)
        return
    for part, last in _parts(steps, NODES_PER_MESSAGE):
        body = pb.WatchNodesResponse.Change(
            upserts=(node_to_proto(step) for step in part if isinstance(step, Node)),
            removals=(step for step in part if isinstance(step, str)),
        )
        yield pb.WatchNodesResponse(change=body, **(where if last else _MORE))


def pointers_opening(opening: Opening[Pointer], scope: str) -> Iterator[pb.WatchBlockSetsResponse]:
    """Yields the first messages of a watch of pointers; of one scope unless it is empty."""
    where: dict[str, Any] = {"revision": opening.revision, "digest": opening.digest}
    if opening.snapshot is None:
        yield pb.WatchBlockSetsResponse(resumed=pb.WatchBlockSetsResponse.Resumed(), **where)
        return
    pointers = [pointer for _, pointer in sorted(opening.snapshot.items()) if scope in ("", pointer.scope)]
    for part, last in _parts(pointers, POINTERS_PER_MESSAGE):
        snapshot = pb.WatchBlockSetsResponse.Snapshot(pointers=map(pointer_to_proto, part))
        yield pb.WatchBlockSetsResponse(snapshot=snapshot, **(where if last else _MORE))


def pointers_change(change: Change[Pointer], scope: str) -> Iterator[pb.WatchBlockSetsResponse]:
    """Yields the later messages of a watch of pointers; a sign of life when nothing of the scope changed."""
    where: dict[str, Any] = {"revision": change.revision, "digest": change.digest}
    upserts = [pointer for pointer in change.upserts.values() if scope in ("", pointer.scope)]
    removals = [pointer.id for pointer in change.removals.values() if scope in ("", pointer.scope)]
    if not upserts and not removals:
        yield pb.WatchBlockSetsResponse(**where)
        return
    for part, last in _parts([*upserts, *removals], POINTERS_PER_MESSAGE):
        body = pb.WatchBlockSetsResponse.Change(
            upserts=(pointer_to_proto(step) for step in part if isinstance(step, Pointer)),
            removals=(pointer_id_to_proto(step) for step in part if isinstance(step, PointerId)),
        )
        yield pb.WatchBlockSetsResponse(change=body, **(where if last else _MORE))


def _parts(items: Sequence[T], size: int) -> Iterator[tuple[Sequence[T], bool]]:
    """Cuts a sequence into pieces of at most ``size``, at least one, and tells the last."""
    for start in range(0, max(1, len(items)), size):
        yield items[start : start + size], start + size >= len(items)


def _engine_to_proto(engine: Engine) -> pb.Engine:
    return pb.Engine(
        engine_id=engine.engine_id,
        rank=engine.rank,
        compatibility_hash=engine.compatibility_hash,
        weights_digest=engine.weights_digest,
        block_size=engine.block_size,
        block_count=engine.block_count,
        retention_ttl=duration(engine.retention_ttl_s),
        connector_version=engine.connector_version,
        reuse=engine.reuse,
        reuse_problem=engine.reuse_problem,
        vllm_version=engine.vllm_version,
        second_chance=engine.second_chance,
        fenced=engine.fenced,
        tp_size=engine.tp_size,
        kv_head_count=engine.kv_head_count,
    )


def _engine_from_proto(message: pb.Engine) -> Engine:
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
        fenced=message.fenced,
        tp_size=message.tp_size,
        kv_head_count=message.kv_head_count,
    )
