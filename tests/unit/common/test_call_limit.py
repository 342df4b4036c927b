"""A server that runs as many calls as it may refuses the next one, and says why."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from backhaul.registry.v1 import registry_pb2 as registry
from backhaul.registry.v1.registry_pb2_grpc import NodeServiceStub, add_NodeServiceServicer_to_server
from backhaul.router.v1 import router_pb2 as router
from backhaul.router.v1.router_pb2_grpc import add_InferenceServiceServicer_to_server
from backhaul_common import call_limit
from backhaul_common.errors import BackhaulError, ResourceExhaustedError
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.instruments import REFUSED_CALLS
from tests.fakes.complaints import complaints
from tests.fakes.eventually import eventually
from tests.fakes.partial import Partial
from tests.fakes.readings import Readings


class Nodes(Partial):
    """Answers when it is let go; watches for ever."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.running = 0

    async def ListNodes(self, request: Any, context: Any) -> registry.ListNodesResponse:
        self.running += 1
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        return registry.ListNodesResponse()

    async def JoinNode(self, requests: Any, context: Any) -> None:
        await context.read()

    async def WatchNodes(self, request: Any, context: Any) -> AsyncIterator[registry.WatchNodesResponse]:
        yield registry.WatchNodesResponse(revision=1)
        await asyncio.Event().wait()


class Inference(Partial):
    """Methods that have spans."""

    async def ListModels(self, request: Any, context: Any) -> router.ListModelsResponse:
        return router.ListModelsResponse()

    async def ChatCompletions(self, request: Any, context: Any) -> AsyncIterator[router.ChatCompletionsResponse]:
        yield router.ChatCompletionsResponse()


@asynccontextmanager
async def serving(max_calls: int) -> AsyncIterator[tuple[Nodes, grpc.aio.Channel]]:
    nodes = Nodes()
    server = GrpcServer(address="127.0.0.1:0", service_names=(), max_calls=max_calls)
    add_NodeServiceServicer_to_server(cast(Any, nodes), server.server)
    add_InferenceServiceServicer_to_server(cast(Any, Inference()), server.server)
    async with server, open_channel(f"127.0.0.1:{server.port}") as channel:
        yield nodes, channel


async def list_nodes(channel: grpc.aio.Channel) -> BackhaulError | None:
    """Returns the error of a call, None for success."""
    try:
        await NodeServiceStub(channel).ListNodes(registry.ListNodesRequest(), timeout=10)
    except grpc.aio.AioRpcError as error:
        return to_error(error)
    return None


async def test_ten_times_as_many_calls_are_answered_or_refused_at_once_and_then_all_again(read: Readings) -> None:
    async with serving(5) as (nodes, channel):
        calls = [asyncio.create_task(list_nodes(channel)) for _ in range(50)]
        await eventually(lambda: sum(call.done() for call in calls) == 45)
        assert nodes.running == 5
        assert read.counted(REFUSED_CALLS) == {("calls",): 45}
        nodes.go.set()
        results = await asyncio.gather(*calls)
        refused = [result for result in results if result is not None]
        assert len(refused) == 45
        for error in refused:
            assert isinstance(error, ResourceExhaustedError)
            assert (error.reason, error.metadata) == ("TOO_MANY_CALLS", {"limit": "5"})
            assert "5 calls" in error.message
        assert await asyncio.gather(*[list_nodes(channel) for _ in range(5)]) == [None] * 5


async def test_calls_whose_requests_are_still_on_their_way_are_counted() -> None:
    async with serving(3) as (nodes, channel):
        nodes.go.set()
        begun: list[grpc.aio.StreamUnaryCall[Any, Any]] = []

        async def full() -> bool:
            # One more each time: the call that looks has a place itself.
            begun.append(channel.stream_unary("/backhaul.registry.v1.NodeService/ListNodes")())
            refusal = await list_nodes(channel)
            return refusal is not None and refusal.reason == "TOO_MANY_CALLS"

        await eventually(full)
        for call in begun:
            call.cancel()

        async def free() -> bool:
            return await list_nodes(channel) is None

        await eventually(free)


async def test_streams_are_counted_apart_and_given_free_when_they_end(read: Readings) -> None:
    async with serving(2) as (nodes, channel):
        nodes.go.set()
        stub = NodeServiceStub(channel)
        watches = [stub.WatchNodes(registry.WatchNodesRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        assert await list_nodes(channel) is None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchNodes(registry.WatchNodesRequest()).read()
        assert to_error(caught.value).reason == "TOO_MANY_CALLS"
        assert read.counted(REFUSED_CALLS) == {("streams",): 1}
        for watch in watches:
            watch.cancel()

        async def taken() -> bool:
            try:
                message = await stub.WatchNodes(registry.WatchNodesRequest()).read()
            except grpc.aio.AioRpcError:
                return False
            return isinstance(message, registry.WatchNodesResponse)

        await eventually(taken)


async def test_cancelled_calls_are_counted_out() -> None:
    async with serving(3) as (nodes, channel):
        for _ in range(5):
            calls = [asyncio.create_task(list_nodes(channel)) for _ in range(3)]
            await eventually(lambda: nodes.running == 3)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            await eventually(lambda: nodes.running == 0)
        nodes.go.set()
        assert await list_nodes(channel) is None


async def test_health_is_answered_when_nothing_else_is() -> None:
    async with serving(1) as (nodes, channel):
        running = asyncio.create_task(list_nodes(channel))
        await eventually(lambda: nodes.running == 1)
        for _ in range(3):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        nodes.go.set()
        assert await running is None


NODES, INFERENCE = "/backhaul.registry.v1.NodeService", "/backhaul.router.v1.InferenceService"


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (f"{NODES}/ListNodes", "calls"),
        (f"{INFERENCE}/ListModels", "calls"),
        (f"{NODES}/WatchNodes", "streams"),
        (f"{NODES}/JoinNode", "streams"),
        (f"{INFERENCE}/ChatCompletions", "streams"),
        ("/grpc.health.v1.Health/Check", "checks"),
        ("/grpc.health.v1.Health/Watch", "watches"),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "watches"),
    ],
)
async def test_a_method_of_any_kind_is_refused_before_its_request_has_come(
    method: str, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call_limit, "MAX_CHECKS", 2)
    monkeypatch.setattr(call_limit, "MAX_WATCHES", 2)
    async with serving(2) as (_, channel):
        calls: list[Any] = [channel.stream_stream(method)(timeout=20) for _ in range(3)]
        reads = [asyncio.create_task(call.read()) for call in calls]
        [refused], _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        error = to_error(cast(Any, refused.exception()))
        assert (type(error), error.reason, error.metadata) == (ResourceExhaustedError, "TOO_MANY_CALLS", {"limit": "2"})
        assert f"2 {kind}" in error.message
        for call in calls:
            call.cancel()
        await asyncio.wait(reads)
    assert complaints(caplog) == []


async def test_watches_of_health_and_reflection_have_a_limit_of_their_own_and_shut_nothing_else_out() -> None:
    async with serving(2) as (nodes, channel):
        nodes.go.set()
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(call_limit.MAX_WATCHES)]
        await asyncio.gather(*(watch.read() for watch in watches))
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        for more in (health.Watch(health_pb2.HealthCheckRequest()), reflection):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await more.read()
            assert to_error(caught.value).reason == "TOO_MANY_CALLS"
        await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert await list_nodes(channel) is None
        stream = NodeServiceStub(channel).WatchNodes(registry.WatchNodesRequest())
        assert isinstance(await stream.read(), registry.WatchNodesResponse)
        for watch in (*watches, stream):
            watch.cancel()
