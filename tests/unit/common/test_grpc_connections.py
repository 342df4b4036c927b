"""What a server takes of its connections, and a channel of its peer, before anything of ours runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from backhaul.registry.v1 import registry_pb2 as registry
from backhaul.registry.v1.registry_pb2_grpc import NodeServiceStub, add_NodeServiceServicer_to_server
from backhaul_common.grpc_client import open_channel
from backhaul_common.grpc_server import MAX_MESSAGE_BYTES, GrpcServer
from tests.fakes.eventually import eventually
from tests.fakes.partial import Partial

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How HTTP/2 begins, with settings that change nothing."""
ACKNOWLEDGED = bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
BOMB = bytes(MAX_MESSAGE_BYTES + 1)
"""Packs into a few KiB."""


class Nodes(Partial):
    async def ListNodes(self, request: Any, context: Any) -> registry.ListNodesResponse:
        return registry.ListNodesResponse(revision=7)


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[int]:
    server = GrpcServer(address="127.0.0.1:0", service_names=(), **limits)
    add_NodeServiceServicer_to_server(cast(Any, Nodes()), server.server)
    async with server:
        yield server.port


@asynccontextmanager
async def idle_connection(port: int) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + ACKNOWLEDGED)
    try:
        yield reader
    finally:
        writer.close()


async def revision(channel: grpc.aio.Channel) -> int:
    response: registry.ListNodesResponse = await NodeServiceStub(channel).ListNodes(
        registry.ListNodesRequest(), timeout=10
    )
    return response.revision


async def test_a_packed_message_is_refused_before_it_is_unpacked() -> None:
    options = (("grpc.max_send_message_length", -1),)
    async with (
        serving() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options, compression=grpc.Compression.Gzip) as channel,
    ):
        call: Any = channel.unary_unary("/backhaul.registry.v1.NodeService/ListNodes")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(BOMB, timeout=10)
    # Unpacked it would be RESOURCE_EXHAUSTED: larger than allowed.
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_packed_answer_of_a_peer_is_refused_before_it_is_unpacked() -> None:
    async def answer(_request: bytes, _context: Any) -> bytes:
        return BOMB

    options = (("grpc.max_send_message_length", -1),)
    server = grpc.aio.server(options=options, compression=grpc.Compression.Gzip)
    method: Any = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peer", {"Ask": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/peer/Ask")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=10)
    await server.stop(0)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_connections_beyond_the_limit_are_closed_and_those_that_stand_go_on() -> None:
    async with serving(max_connections=3) as port, open_channel(f"127.0.0.1:{port}") as channel:
        assert await revision(channel) == 7
        async with AsyncExitStack() as opened:
            for _ in range(2):
                await opened.enter_async_context(idle_connection(port))
            async with idle_connection(port) as beyond:
                assert await asyncio.wait_for(beyond.read(), 10) == b""
            assert await revision(channel) == 7

        async def room() -> bool:
            async with idle_connection(port) as another:
                return await another.read(1) != b""

        await eventually(room)


async def test_a_connection_without_calls_is_closed_and_clients_call_on_over_another() -> None:
    async with serving(idle_s=0.3) as port, open_channel(f"127.0.0.1:{port}") as channel, idle_connection(port) as idle:
        assert await revision(channel) == 7
        await asyncio.wait_for(idle.read(), 10)
        await eventually(lambda: channel.get_state() == grpc.ChannelConnectivity.IDLE)
        assert await revision(channel) == 7
