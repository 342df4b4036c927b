"""A registry in memory, over real gRPC on 127.0.0.1, with faults to order."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Any, Self

from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_common.durations import duration, seconds
from backhaul_common.errors import AbortedError, AlreadyExistsError, InvalidArgumentError, UnavailableError
from backhaul_common.grpc_server import GrpcServer
from backhaul_registry import convert
from backhaul_registry.core import rules
from tests.fakes.partial import Partial

PointerKey = tuple[str, str, str]


def check_node(node: registry_pb2.Node) -> None:
    """Accepts a record as a registry does. Raises InvalidArgumentError."""
    rules.check_node_size(node.ByteSize())
    rules.check_node(convert.node_from_proto(node))


class FakeRegistry:
    """`IndexService` and `NodeService`, as far as agents use them, with the rules of the real ones."""

    def __init__(self) -> None:
        self.nodes: dict[str, registry_pb2.Node] = {}
        self.pointers: dict[PointerKey, registry_pb2.BlockSetPointer] = {}
        self.ended_engines: list[str] = []
        """Engines whose publish stream was half-closed."""
        self.opened_engines: list[str] = []
        self.batches: list[registry_pb2.PublishBlockSetsRequest.Batch] = []
        self.joined: list[registry_pb2.Node] = []
        """Records that nodes asked to join with."""
        self.keep_alive_count = 0
        self.left_count = 0
        self.refused_engine = ""
        """A record that names it is refused."""
        self.taken = False
        """Whether joins are refused as NODE_TAKEN."""
        self.answering = asyncio.Event()
        """Cleared: nothing is answered."""
        self.answering.set()
        self.acknowledging = asyncio.Event()
        """Cleared: batches are applied but not acknowledged."""
        self.acknowledging.set()
        self.granted_ttl_s: float | None = None
        """TTL that joins get, instead of the one they ask for."""
        self._lease_ids = 0
        self._live_lease = 0
        self._joins: set[asyncio.Event] = set()
        self._publishings: set[asyncio.Event] = set()
        self._server = GrpcServer(address="127.0.0.1:0", service_names=[])
        registry_pb2_grpc.add_NodeServiceServicer_to_server(_node_servicer(self), self._server.server)
        registry_pb2_grpc.add_IndexServiceServicer_to_server(_index_servicer(self), self._server.server)

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.__aexit__(kind, error, trace)

    @property
    def address(self) -> str:
        """host:port of the server."""
        return f"127.0.0.1:{self._server.port}"

    def lose_lease(self) -> None:
        """Forgets the node and its lease, as after a revocation; streams notice at their next message."""
        self.nodes.clear()
        self._live_lease = 0

    def break_joins(self) -> None:
        """Breaks the streams of nodes."""
        for event in self._joins:
            event.set()

    def break_publishing(self) -> None:
        """Breaks the streams of pointers; the pointers stay, as they do for one TTL."""
        for event in self._publishings:
            event.set()

    def keys_of(self, set_id: str) -> set[str]:
        """Returns the lookup keys that lead to a set."""
        return {key for _, key, found in self.pointers if found == set_id}

    async def join(self, requests: AsyncIterator[registry_pb2.JoinNodeRequest]) -> AsyncGenerator[Any, None]:
        """Serves JoinNode."""
        ttl_s = 10.0
        async with contextlib.aclosing(_until_broken(requests, self._joins)) as unbroken:
            async for request in unbroken:
                await self.answering.wait()
                response = registry_pb2.JoinNodeResponse(sequence=request.sequence)
                step = request.WhichOneof("step")
                if step == "leave":
                    self._leave()
                    response.left.SetInParent()
                    yield response
                    return
                if step == "join":
                    ttl_s = self._join(request.join)
                    response.joined.lease_id = self._live_lease
                else:
                    self._keep(request)
                    response.kept.SetInParent()
                response.ttl.CopyFrom(duration(ttl_s))
                yield response

    def _leave(self) -> None:
        self.left_count += 1
        self.nodes.clear()
        self._live_lease = 0

    def _join(self, join: registry_pb2.JoinNodeRequest.Join) -> float:
        self.joined.append(join.node)
        self._check_node(join.node)
        if self.taken:
            raise AlreadyExistsError("NODE_TAKEN", "another session holds the node")
        if join.lease_id and join.lease_id != self._live_lease:
            raise AbortedError("LEASE_LOST", "the lease is gone")
        if not join.lease_id:
            self._lease_ids += 1
            self._live_lease = self._lease_ids
        self.nodes[join.node.node_id] = join.node
        return self.granted_ttl_s or seconds(join.ttl)

    def _keep(self, request: registry_pb2.JoinNodeRequest) -> None:
        if not self._live_lease:
            raise AbortedError("LEASE_LOST", "the lease is gone")
        self.keep_alive_count += 1
        if request.HasField("update"):
            self._check_node(request.update.node)
            self.nodes[request.update.node.node_id] = request.update.node

    def _check_node(self, node: registry_pb2.Node) -> None:
        check_node(node)
        if self.refused_engine in (engine.engine_id for engine in node.engines):
            raise InvalidArgumentError("NODE_INVALID", "an engine that is not liked", field="engines")

    async def publish(self, requests: AsyncIterator[registry_pb2.PublishBlockSetsRequest]) -> AsyncGenerator[Any, None]:
        """Serves PublishBlockSets."""
        engine_id = ""
        async with contextlib.aclosing(_until_broken(requests, self._publishings)) as unbroken:
            async for request in unbroken:
                await self.answering.wait()
                response = registry_pb2.PublishBlockSetsResponse()
                if request.HasField("open"):
                    engine_id = request.open.engine_id
                    self.opened_engines.append(engine_id)
                    response.opened.ttl.CopyFrom(duration(10))
                else:
                    self._apply(request.batch)
                    await self.acknowledging.wait()
                    response.acknowledged.nonce = request.batch.nonce
                yield response
        self.ended_engines.append(engine_id)
        self.pointers = {key: value for key, value in self.pointers.items() if value.engine_id != engine_id}

    def _apply(self, batch: registry_pb2.PublishBlockSetsRequest.Batch) -> None:
        self.batches.append(batch)
        rules.check_batch(
            list(map(convert.pointer_from_proto, batch.upserts)),
            list(map(convert.pointer_id_from_proto, batch.removals)),
        )
        for pointer in batch.upserts:
            self.pointers[pointer.scope, pointer.key, pointer.set_id] = pointer
        for pointer in batch.removals:
            self.pointers.pop((pointer.scope, pointer.key, pointer.set_id), None)


async def _until_broken(requests: AsyncIterator[Any], breaks: set[asyncio.Event]) -> AsyncGenerator[Any, None]:
    broken = asyncio.Event()
    breaks.add(broken)
    breaking = asyncio.ensure_future(broken.wait())
    following: asyncio.Future[Any] = breaking
    try:
        while True:
            following = asyncio.ensure_future(anext(requests, None))
            await asyncio.wait({following, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if broken.is_set():
                raise UnavailableError("BROKEN", "the stream was broken by the test")
            if (request := following.result()) is None:
                return
            yield request
    finally:
        following.cancel()
        breaking.cancel()
        breaks.discard(broken)


def _node_servicer(registry: FakeRegistry) -> Any:
    class Nodes(Partial):
        async def JoinNode(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(registry.join(requests)) as responses:
                async for response in responses:
                    yield response

    return Nodes()


def _index_servicer(registry: FakeRegistry) -> Any:
    class Index(Partial):
        async def PublishBlockSets(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(registry.publish(requests)) as responses:
                async for response in responses:
                    yield response

    return Index()
