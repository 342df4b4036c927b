"""A request must come in time, and be one; what lives long may then be silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from backhaul.registry.v1 import registry_pb2 as registry
from backhaul.registry.v1.registry_pb2_grpc import NodeServiceStub, add_NodeServiceServicer_to_server
from backhaul.router.v1 import router_pb2 as router
from backhaul.router.v1.router_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from backhaul_common import grpc_server
from backhaul_common.errors import DeadlineExceededError, InvalidArgumentError
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_common.grpc_server import GrpcServer
from tests.fakes.complaints import complaints
from tests.fakes.partial import Partial

NODES, INFERENCE = "/backhaul.registry.v1.NodeService", "/backhaul.router.v1.InferenceService"
EVERY_KIND = (
    f"{NODES}/ListNodes",
    f"{NODES}/WatchNodes",
    f"{NODES}/JoinNode",
    f"{INFERENCE}/ChatCompletions",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
SHORT_S, AMPLE_S, LONGER_S = 0.2, 1.0, 1.5
"""Time for a request that does not come, time for one that does, and more than that."""


class Nodes(Partial):
    """Methods of one answer, of a stream that a coroutine writes, and of two streams."""

    async def ListNodes(self, request: Any, context: Any) -> registry.ListNodesResponse:
        return registry.ListNodesResponse()

    async def WatchNodes(self, request: registry.WatchNodesRequest, context: Any) -> None:
        await asyncio.sleep(LONGER_S)
        await context.write(registry.WatchNodesResponse(revision=request.start_revision))

    async def JoinNode(self, requests: AsyncIterator[registry.JoinNodeRequest], context: Any) -> None:
        async for request in requests:
            await context.write(registry.JoinNodeResponse(sequence=request.sequence))


class Inference(Partial):
    """A method whose stream a generator gives."""

    async def ChatCompletions(self, request: Any, context: Any) -> AsyncIterator[router.ChatCompletionsResponse]:
        await asyncio.sleep(LONGER_S)
        yield router.ChatCompletionsResponse(chunk=request.body)


@asynccontextmanager
async def serving(receive_s: float = SHORT_S, **limits: Any) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer(address="127.0.0.1:0", service_names=(), receive_s=receive_s, **limits)
    add_NodeServiceServicer_to_server(cast(Any, Nodes()), server.server)
    add_InferenceServiceServicer_to_server(cast(Any, Inference()), server.server)
    async with server, open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


def unfinished(channel: grpc.aio.Channel, method: str) -> Any:
    """Begins a call whose request does not come."""
    return channel.stream_stream(method)(timeout=8)


@pytest.mark.parametrize("method", EVERY_KIND)
async def test_a_call_whose_request_does_not_come_is_ended_and_told_why(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unfinished(channel, method).read()
    error = to_error(caught.value)
    assert (type(error), error.reason) == (DeadlineExceededError, "SLOW_WRITER")
    assert complaints(caplog) == []


async def test_places_of_calls_whose_requests_do_not_come_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # One after the other more than gRPC itself lets run: it counts them out, too.
    monkeypatch.setattr(grpc_server, "_SPARE_CALLS", 10)
    async with serving(max_calls=20) as channel:
        for _ in range(3):
            calls = [unfinished(channel, f"{NODES}/ListNodes") for _ in range(30)]
            reads = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
            reasons = [to_error(cast(Any, error)).reason for error in reads]
            assert set(reasons) == {"SLOW_WRITER", "TOO_MANY_CALLS"}
            await NodeServiceStub(channel).ListNodes(registry.ListNodesRequest(), timeout=20)


async def test_what_has_got_its_request_may_take_longer() -> None:
    async with serving(AMPLE_S) as channel:
        watch: Any = NodeServiceStub(channel).WatchNodes(registry.WatchNodesRequest(start_revision=7), timeout=20)
        answer: Any = InferenceServiceStub(channel).ChatCompletions(
            router.ChatCompletionsRequest(body=b"hi"), timeout=20
        )
        assert (await watch.read()).revision == 7
        assert (await answer.read()).chunk == b"hi"


async def test_a_stream_that_has_begun_may_be_silent() -> None:
    async with serving(AMPLE_S) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        await health.read()
        join: Any = NodeServiceStub(channel).JoinNode(timeout=20)
        await join.write(registry.JoinNodeRequest(sequence=1))
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=20)
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await asyncio.sleep(LONGER_S)
        await join.write(registry.JoinNodeRequest(sequence=2))
        assert [(await join.read()).sequence for _ in range(2)] == [1, 2]
        assert (await reflection.read()).list_services_response.service
        assert not health.done()
        await join.done_writing()
        assert await join.read() == grpc.aio.EOF
        assert not reflection.done()
        health.cancel()
        reflection.cancel()


@pytest.mark.parametrize("method", EVERY_KIND)
async def test_a_message_that_is_none_is_told_so_and_leaves_no_trace_in_the_log(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(60) as channel:
        call: Any = channel.stream_stream(method)(timeout=20)
        await call.write(b"\xff\xffMARK")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error = to_error(caught.value)
    assert (type(error), error.reason) == (InvalidArgumentError, "UNREADABLE")
    assert complaints(caplog) == []


async def test_a_later_message_that_is_none_ends_its_stream_in_the_same_way() -> None:
    async with serving(60) as channel:
        call: Any = channel.stream_stream(f"{NODES}/JoinNode")(timeout=20)
        await call.write(registry.JoinNodeRequest(sequence=1).SerializeToString())
        await call.read()
        await call.write(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert to_error(caught.value).reason == "UNREADABLE"


async def test_a_call_that_ends_without_its_request_is_told_so() -> None:
    async with serving(60) as channel:
        call = unfinished(channel, f"{NODES}/ListNodes")
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert to_error(caught.value).reason == "NO_REQUEST"


async def test_clients_that_leave_before_their_request_has_come_leave_no_errors(
    no_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(60, max_calls=100) as channel:
        for method in EVERY_KIND[:4]:
            calls = [unfinished(channel, method) for _ in range(20)]
            await NodeServiceStub(channel).ListNodes(registry.ListNodesRequest(), timeout=20)
            for call in calls:
                call.cancel()
        await NodeServiceStub(channel).ListNodes(registry.ListNodesRequest(), timeout=20)
    assert complaints(caplog) == []
