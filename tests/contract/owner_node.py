"""A whole node agent beside fakes: what the owner's contract tests stand on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul.registry.v1 import registry_pb2
from backhaul_common.errors import BackhaulError
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_common.tls import Identity
from backhaul_node_agent.app import App
from backhaul_node_agent.config import Config
from tests.fakes.connector import WEIGHTS, FakeConnector, hello
from tests.fakes.eventually import eventually
from tests.fakes.leaks import no_tasks_left
from tests.fakes.registry import FakeRegistry
from tests.fakes.side_channel import FakeSideChannel
from tests.fakes.vllm_http import FakeVllmHttp


@dataclass
class AgentNode:
    """A running agent beside a fake engine."""

    app: App
    config: Config
    http: FakeVllmHttp
    side_channel: FakeSideChannel
    connector: FakeConnector
    stub: Any
    stopping: asyncio.Event
    running: asyncio.Task[None]

    async def claim(
        self, set_id: str = "set-1", *, request_id: str = "request-1", **changes: Any
    ) -> agent_pb2.ClaimBlockSetResponse:
        """Claims a set. Raises BackhaulError."""
        fields = {"engine_id": self.connector.greeting.engine_id, "scope": "scope-1", "weights_digest": WEIGHTS}
        request = agent_pb2.ClaimBlockSetRequest(request_id=request_id, set_id=set_id, **{**fields, **changes})
        try:
            response: agent_pb2.ClaimBlockSetResponse = await self.stub.ClaimBlockSet(request, timeout=2)
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error
        return response

    async def refusal(self, set_id: str = "set-1", **changes: Any) -> str:
        """Returns the reason for which a claim is refused."""
        try:
            await self.claim(set_id, **changes)
        except BackhaulError as error:
            return error.reason
        raise AssertionError("the claim was granted")

    async def states(self) -> dict[str, int]:
        """Returns the states of all sets."""
        listing = await self.stub.ListBlockSets(agent_pb2.ListBlockSetsRequest(), timeout=2)
        return {held.set_id: held.state for held in listing.block_sets}

    async def state(self, set_id: str = "set-1") -> int:
        """Returns one set's state, 0 when it is gone."""
        return (await self.states()).get(set_id, 0)

    async def becomes(self, state: int, set_id: str = "set-1", timeout_s: float = 5.0) -> None:
        """Waits until a set has a state."""

        async def holds() -> bool:
            return await self.state(set_id) == state

        await eventually(holds, timeout_s)

    async def stop(self) -> None:
        """Ends the agent as SIGTERM does."""
        self.stopping.set()
        await self.running


@dataclass
class OwnerNode(AgentNode):
    """The same, with a fake registry."""

    registry: FakeRegistry

    @property
    def record(self) -> registry_pb2.Node:
        """The node's record in the directory."""
        return self.registry.nodes[self.config.node]

    async def ready(self) -> None:
        """Waits until the node takes turns and its engine can reuse blocks."""

        def holds() -> bool:
            node = self.registry.nodes.get(self.config.node)
            return node is not None and reuses(node)

        await eventually(holds)

    async def published(self, set_id: str = "set-1") -> None:
        """Waits until a set can be found."""
        await eventually(lambda: bool(self.registry.keys_of(set_id)))

    async def unpublished(self, set_id: str = "set-1") -> None:
        """Waits until a set cannot be found."""
        await eventually(lambda: not self.registry.keys_of(set_id))


def reuses(node: registry_pb2.Node) -> bool:
    """Tells whether a node takes turns and its engine can reuse blocks."""
    return node.state == registry_pb2.NODE_STATE_READY and bool(node.engines) and node.engines[0].reuse


@contextlib.asynccontextmanager
async def agent_node(
    tmp_path: Path,
    *registries: str,
    caller: Identity | None = None,
    engine_tls: Identity | None = None,
    **settings: Any,
) -> AsyncIterator[AgentNode]:
    """Runs an agent beside a fake engine, which shows ``engine_tls``; its own caller shows ``caller``."""
    with FakeSideChannel() as side_channel:
        async with FakeVllmHttp(tls=engine_tls) as http:
            defaults = {
                "engine_url": http.url,
                "side_channel": f"127.0.0.1:{side_channel.port}",
                "registry": registries,
                "listen": "127.0.0.1:0",
                "advertise": "127.0.0.1:7201",
                "node_id": "node-1",
                "connector_socket": str(tmp_path / "agent" / "connector.sock"),
                # The fake engine shows no figures: drains last as long as they may.
                "drain_s": 0.3,
            }
            config = Config(**{**defaults, **settings})
            app, stopping = App(config), asyncio.Event()
            running = asyncio.create_task(app.run(stopping))
            await eventually(lambda: app.port > 0 or running.done())
            connector = FakeConnector(config.socket_path, hello(side_channel_port=side_channel.port))
            async with open_channel(f"127.0.0.1:{app.port}", caller) as channel:
                stub = agent_pb2_grpc.BlockSetServiceStub(channel)
                try:
                    yield AgentNode(app, config, http, side_channel, connector, stub, stopping, running)
                finally:
                    await connector.close()
                    stopping.set()
                    await asyncio.wait([running])
            running.result()


@contextlib.asynccontextmanager
async def owner_node(tmp_path: Path, *, connect: bool = True, **settings: Any) -> AsyncIterator[OwnerNode]:
    """Runs an agent beside a fake engine and a fake registry. Fails when tasks are left behind."""
    async with (
        no_tasks_left(),
        FakeRegistry() as registry,
        agent_node(tmp_path, registry.address, **settings) as agent,
    ):
        node = OwnerNode(**{field.name: getattr(agent, field.name) for field in fields(agent)}, registry=registry)
        if connect:
            await node.connector.connect()
            await node.ready()
        yield node
