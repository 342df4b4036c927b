"""gRPC face of the node directory."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry import trace

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul.registry.v1.registry_pb2_grpc import NodeServiceServicer
from backhaul_common.attributes import NODE_ID
from backhaul_common.durations import duration, seconds
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.etcd import Lease
from backhaul_registry import convert
from backhaul_registry.core import rules
from backhaul_registry.core.feed import Change
from backhaul_registry.core.model import Node
from backhaul_registry.core.session import Increasing, check_update
from backhaul_registry.etcd_store import NodeStore
from backhaul_registry.hub import Hub
from backhaul_registry.together import refuse_after, run_until_first

Context = Any

LIFE_SIGN_S = 10.0
"""Longest silence of a watch of nodes."""


class NodeService(NodeServiceServicer):
    """Joins, lists and watches nodes.

    Streams are plain coroutines that write to the context, so that all their tasks end inside the call. gRPC allows
    that (grpc.aio, ``ServicerContext.write``), but the generated base class is typed for generators only: the type
    checker is told to ignore the difference.
    """

    def __init__(
        self, store: NodeStore, hub: Hub[Node], stopping: asyncio.Event, *, life_sign_s: float = LIFE_SIGN_S
    ) -> None:
        self._store = store
        self._hub = hub
        self._stopping = stopping
        self._life_sign_s = life_sign_s

    async def JoinNode(  # type: ignore[override]  # it writes; the stub only knows handlers that yield
        self, request_iterator: AsyncIterator[pb.JoinNodeRequest], context: Context
    ) -> None:
        """Keeps one node joined for as long as its agent says so."""
        await run_until_first(self._join(request_iterator, context), refuse_after(self._stopping))

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        """Returns all nodes, read from etcd."""
        nodes, revision = await self._store.list()
        return pb.ListNodesResponse(nodes=map(convert.node_to_proto, nodes), revision=revision)

    async def WatchNodes(  # type: ignore[override]  # it writes; the stub only knows handlers that yield
        self, request: pb.WatchNodesRequest, context: Context
    ) -> None:
        """Tells one client about all changes."""
        await run_until_first(self._watch(request, context), refuse_after(self._stopping))

    async def _watch(self, request: pb.WatchNodesRequest, context: Context) -> None:
        with self._hub.watching():
            subscription = await self._hub.subscribe(request.start_revision, request.start_digest)
            try:
                for message in convert.nodes_opening(subscription.opening):
                    await context.write(message)
                for change in subscription.opening.missed:
                    await self._tell(change, context)
                while True:
                    news = await subscription.next(self._life_sign_s)
                    await self._tell(news or self._hub.quiet(), context)
            finally:
                self._hub.unsubscribe(subscription)

    async def _tell(self, change: Change[Node], context: Context) -> None:
        for message in convert.nodes_change(change):
            await context.write(message)

    async def _join(self, requests: AsyncIterator[pb.JoinNodeRequest], context: Context) -> None:
        order = Increasing()
        node: Node | None = None
        lease = Lease(0, 0.0)
        async for request in requests:
            order = order.next(request.sequence)
            step = request.WhichOneof("step")
            if node is None:
                node, lease = await self._admit(request)
                joined = pb.JoinNodeResponse.Joined(lease_id=lease.lease_id)
                await context.write(_answer(request, lease, joined=joined))
                continue
            match step:
                case "keep_alive":
                    lease = await self._store.keep(node, lease.lease_id)
                case "update":
                    node = _updated(node, request.update.node)
                    lease = await self._store.keep(node, lease.lease_id)
                case "leave":
                    await self._store.leave(lease.lease_id)
                    await context.write(pb.JoinNodeResponse(sequence=request.sequence, left=pb.JoinNodeResponse.Left()))
                    return
                case _:
                    raise InvalidArgumentError("STEP_UNEXPECTED", "after join come keep_alive, update and leave")
            await context.write(_answer(request, lease, kept=pb.JoinNodeResponse.Kept()))

    async def _admit(self, request: pb.JoinNodeRequest) -> tuple[Node, Lease]:
        if request.WhichOneof("step") != "join":
            raise InvalidArgumentError("JOIN_EXPECTED", "the first message must be join")
        join = request.join
        node = _sound(join.node)
        ttl_s = rules.lease_ttl_s(seconds(join.ttl) if join.HasField("ttl") else None)
        with trace.get_tracer(__name__).start_as_current_span("registry.join", attributes={NODE_ID: node.node_id}):
            return node, await self._store.join(node, ttl_s=ttl_s, lease_id=join.lease_id)


def _updated(joined: Node, message: pb.Node) -> Node:
    node = _sound(message)
    check_update(joined, node)
    return node


def _sound(message: pb.Node) -> Node:
    rules.check_node_size(message.ByteSize())
    node = convert.node_from_proto(message)
    rules.check_node(node)
    return node


def _answer(request: pb.JoinNodeRequest, lease: Lease, **step: Any) -> pb.JoinNodeResponse:
    return pb.JoinNodeResponse(sequence=request.sequence, ttl=duration(lease.ttl_s), **step)
