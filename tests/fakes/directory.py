"""A registry for routers over real gRPC: pointers to find, nodes to watch. Nothing joins and nothing is stored."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_common.addresses import join_address
from backhaul_common.errors import BackhaulError
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.tls import Identity
from tests.fakes.engine import FakeEngine
from tests.fakes.partial import Partial


class FakeDirectory(Partial):
    """One registry replica; an async context manager."""

    def __init__(self, host: str = "127.0.0.1", *, tls: Identity | None = None) -> None:
        self.pointers: list[registry_pb2.BlockSetPointer] = []
        self.nodes: dict[str, registry_pb2.Node] = {}
        self.lookups: list[registry_pb2.FindBlockSetsRequest] = []
        self.watches: list[int] = []
        """Start revision of each watch."""
        self.failure: BackhaulError | None = None
        """Answer to every lookup, when set."""
        self.silent = False
        self.port = 0
        self._host = host
        self._tls = tls
        self._revision = 10
        self._changes: list[registry_pb2.WatchNodesResponse] = []
        self._moved = asyncio.Condition()
        self._server: GrpcServer | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens; after a stop, on the same port again."""
        names = ("backhaul.registry.v1.IndexService", "backhaul.registry.v1.NodeService")
        self._server = GrpcServer(address=self.address, service_names=names, tls=self._tls)
        servicer: Any = self
        registry_pb2_grpc.add_IndexServiceServicer_to_server(servicer, self._server.server)
        registry_pb2_grpc.add_NodeServiceServicer_to_server(servicer, self._server.server)
        await self._server.__aenter__()
        self.port = self._server.port

    async def stop(self) -> None:
        """Stops at once."""
        if self._server is not None:
            await self._server.__aexit__(None, None, None)
            self._server = None

    @property
    def address(self) -> str:
        """host:port."""
        return join_address(self._host, self.port)

    async def add(
        self, engine: FakeEngine, *, agent: str = "127.0.0.1:1", node_id: str = "", **fields: Any
    ) -> registry_pb2.Node:
        """Lists a node, READY unless ``state`` says otherwise."""
        role = registry_pb2.ROLE_PREFILL if engine.role == "prefill" else registry_pb2.ROLE_DECODE
        described = registry_pb2.Engine(
            engine_id=engine.engine_id,
            compatibility_hash=fields.pop("compatibility_hash", "hash"),
            weights_digest=fields.pop("weights_digest", "weights"),
            connector_version="0.1.0" if engine.connector else "",
            reuse=engine.connector,
            second_chance=fields.pop("second_chance", False),
            fenced=fields.pop("fenced", False),
        )
        node = registry_pb2.Node(
            node_id=node_id or f"{engine.role}-{engine.port}",
            role=role,
            agent_address=agent,
            engine_url=engine.url,
            models=engine.models,
            engines=[described],
            state=fields.pop("state", registry_pb2.NODE_STATE_READY),
        )
        assert not fields, fields
        await self.put(node)
        return node

    async def put(self, node: registry_pb2.Node) -> None:
        """Writes a node's record."""
        self.nodes[node.node_id] = node
        await self._change(registry_pb2.WatchNodesResponse.Change(upserts=[node]))

    async def remove(self, node_id: str) -> None:
        """Removes a node."""
        self.nodes.pop(node_id, None)
        await self._change(registry_pb2.WatchNodesResponse.Change(removals=[node_id]))

    def publish(self, key: str, *, set_id: str, node_id: str, engine_id: str, scope: str = "", **fields: Any) -> None:
        """Stores a pointer; an empty scope is found in any."""
        defaults: dict[str, Any] = {"token_count": 128, "digest": b"d" * 16, "stride": 64, "identity": b"i" * 16}
        self.pointers.append(
            registry_pb2.BlockSetPointer(
                scope=scope, key=key, set_id=set_id, node_id=node_id, engine_id=engine_id, **{**defaults, **fields}
            )
        )

    async def FindBlockSets(
        self, request: registry_pb2.FindBlockSetsRequest, context: Any
    ) -> registry_pb2.FindBlockSetsResponse:
        """Finds by key."""
        self.lookups.append(request)
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        found = [
            pointer
            for key in request.keys
            for pointer in self.pointers
            if pointer.key == key and pointer.scope in ("", request.scope)
        ]
        return registry_pb2.FindBlockSetsResponse(pointers=found)

    async def WatchNodes(
        self, request: registry_pb2.WatchNodesRequest, context: Any
    ) -> AsyncIterator[registry_pb2.WatchNodesResponse]:
        """Streams a snapshot, or what came after the start revision, then every change."""
        self.watches.append(request.start_revision)
        seen = request.start_revision
        if seen:
            yield registry_pb2.WatchNodesResponse(revision=seen, resumed=registry_pb2.WatchNodesResponse.Resumed())
        else:
            seen = self._revision
            snapshot = registry_pb2.WatchNodesResponse.Snapshot(nodes=self.nodes.values())
            yield registry_pb2.WatchNodesResponse(revision=seen, snapshot=snapshot)
        while True:
            for change in [change for change in self._changes if change.revision > seen]:
                seen = change.revision
                yield change
            async with self._moved:
                if self._revision <= seen:
                    await self._moved.wait()

    async def _change(self, change: registry_pb2.WatchNodesResponse.Change) -> None:
        async with self._moved:
            self._revision += 1
            self._changes.append(registry_pb2.WatchNodesResponse(revision=self._revision, change=change))
            self._moved.notify_all()
