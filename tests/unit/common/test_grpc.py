"""The server and the channel of backhaul_common, through real stubs on a loopback port."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul.registry.v1 import registry_pb2 as registry
from backhaul.registry.v1.registry_pb2_grpc import (
    NodeServiceStub,
    add_NodeServiceServicer_to_server,
)
from backhaul.router.v1 import router_pb2 as router
from backhaul.router.v1.router_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from backhaul_common import errors
from backhaul_common.attributes import RPC_GRPC_STATUS_CODE
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.health import LIVENESS
from backhaul_common.status import CODES
from tests.fakes.complaints import complaints
from tests.fakes.eventually import eventually
from tests.fakes.partial import Partial

NODES = "backhaul.registry.v1.NodeService"

Answer = Callable[[Any], Awaitable[Any]]


class Nodes(Partial):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def ListNodes(self, request: Any, context: Any) -> Any:
        return await self._answer(context)


class Inference(Partial):
    """Streams ``count`` chunks (for ever when None), then raises ``error``."""

    def __init__(self, count: int | None, error: Exception | None = None) -> None:
        self._count = count
        self._error = error
        self.closed = asyncio.Event()

    async def ChatCompletions(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sent = 0
        try:
            while self._count is None or sent < self._count:
                trace.get_tracer("test").start_span("inner").end()
                yield router.ChatCompletionsResponse(chunk=b"x")
                sent += 1
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
        finally:
            self.closed.set()


@asynccontextmanager
async def serving(
    answer: Answer | None = None, inference: Inference | None = None, **options: Any
) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = GrpcServer(address="127.0.0.1:0", service_names=(NODES,), **options)
    if answer is not None:
        add_NodeServiceServicer_to_server(cast(Any, Nodes(answer)), server.server)
    if inference is not None:
        add_InferenceServiceServicer_to_server(cast(Any, inference), server.server)
    async with server, open_channel(f"127.0.0.1:{server.port}") as channel:
        yield server, channel


async def list_nodes(channel: grpc.aio.Channel) -> registry.ListNodesResponse:
    response: registry.ListNodesResponse = await NodeServiceStub(channel).ListNodes(
        registry.ListNodesRequest(), timeout=5
    )
    return response


def raising(error: BaseException) -> Answer:
    async def answer(_context: Any) -> Any:
        raise error

    return answer


@pytest.mark.parametrize("cls", CODES, ids=lambda cls: cls.__name__)
async def test_an_error_arrives_as_the_same_class_reason_and_metadata(cls: type[errors.BackhaulError]) -> None:
    async with serving(raising(cls("SOME_REASON", "some words", node_id="n1"))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_nodes(channel)
    assert caught.value.code() == CODES[cls]
    error = to_error(caught.value)
    assert type(error) is cls
    assert (error.reason, error.message, error.metadata) == ("SOME_REASON", "some words", {"node_id": "n1"})


@pytest.mark.parametrize("letter", ["x", "é", "語", "\0", "\n", "😀", "\ud800"], ids=ascii)
async def test_an_error_of_any_length_arrives_cut(letter: str) -> None:
    wordy = errors.NotFoundError("R", letter * 50_000, **{f"field{n}": letter * 50_000 for n in range(50)})
    async with serving(raising(wordy)) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_nodes(channel)
    error = to_error(caught.value)
    assert (type(error), error.reason) == (errors.NotFoundError, "R")
    shown = letter.encode(errors="replace").decode()
    assert error.message.startswith(shown * 200)
    assert error.message.endswith("…")
    assert error.metadata["field0"].startswith(shown * 40)


async def test_an_unknown_exception_is_logged_and_sent_without_detail(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(raising(RuntimeError("password is hunter2"))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_nodes(channel)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "hunter2" not in str(caught.value.details())


async def test_an_unknown_exception_is_told_to_no_span(spans: InMemorySpanExporter) -> None:
    async with serving(raising(RuntimeError("password is hunter2"))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError):
            await list_nodes(channel)
    finished = spans.get_finished_spans()
    assert {span.kind for span in finished} == {trace.SpanKind.SERVER, trace.SpanKind.CLIENT}
    assert [span.name for span in finished if "hunter2" in span.to_json()] == []


async def test_the_words_of_an_error_are_told_to_the_caller_and_to_no_servers_span(spans: InMemorySpanExporter) -> None:
    error = errors.UnavailableError("ENGINE_FAILED", "no room for hunter2")
    async with serving(raising(error), Inference(1, error)) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as whole:
            await list_nodes(channel)
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await _read(InferenceServiceStub(channel).ChatCompletions(router.ChatCompletionsRequest(), timeout=5))
    for failed in (whole.value, streamed.value):
        assert (failed.code(), failed.details()) == (grpc.StatusCode.UNAVAILABLE, "no room for hunter2")
    servers = [span for span in spans.get_finished_spans() if span.kind is trace.SpanKind.SERVER]
    assert [span.attributes and span.attributes[RPC_GRPC_STATUS_CODE] for span in servers] == [14, 14]
    assert [span.status.is_ok for span in servers] == [False, False]
    assert [span.name for span in servers if "hunter2" in span.to_json()] == []


async def _read(call: Any) -> None:
    async for _ in call:
        pass


async def test_of_what_a_caller_sends_only_its_trace_goes_further(spans: InMemorySpanExporter) -> None:
    further: dict[str, str] = {}

    async def answer(_context: Any) -> registry.ListNodesResponse:
        propagate.inject(further)
        return registry.ListNodesResponse()

    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    async with serving(answer) as (server, _), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        metadata = (("traceparent", parent), ("baggage", "secret=hunter2"), ("user-agent", "hunter2"))
        await NodeServiceStub(channel).ListNodes(registry.ListNodesRequest(), timeout=5, metadata=metadata)
    assert further.keys() == {"traceparent"}
    assert further["traceparent"].startswith(parent[:35])
    assert [span.name for span in spans.get_finished_spans() if "hunter2" in span.to_json()] == []


class _Garbled(grpc.RpcError):
    """A call that failed, with details that are no message."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "upstream connect error"

    def trailing_metadata(self) -> Any:
        return (("grpc-status-details-bin", b"\xff\xff"),)


def test_details_that_somebody_on_the_way_garbled_are_left_out() -> None:
    error = to_error(_Garbled())
    assert (type(error), error.reason) == (errors.UnavailableError, "UNAVAILABLE")


async def test_a_timeout_inside_the_handler_is_deadline_exceeded() -> None:
    async with serving(raising(TimeoutError())) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_nodes(channel)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_cancellation_from_inside_does_not_leave_the_client_waiting() -> None:
    async with serving(raising(asyncio.CancelledError())) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_nodes(channel)
    assert to_error(caught.value).reason == "CANCELLED_INSIDE"


async def test_an_abort_by_the_handler_passes_untouched() -> None:
    async def answer(context: Any) -> None:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "own words")

    async with serving(answer) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_nodes(channel)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "own words")


async def test_a_stream_that_fails_ends_with_its_error() -> None:
    async with serving(inference=Inference(2, errors.AbortedError("LEASE_LOST", "gone"))) as (_, channel):
        call = InferenceServiceStub(channel).ChatCompletions(router.ChatCompletionsRequest(), timeout=5)
        assert [await call.read() for _ in range(2)] == [router.ChatCompletionsResponse(chunk=b"x")] * 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert to_error(caught.value).reason == "LEASE_LOST"


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_nodes(channel)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_over_the_limit_is_resource_exhausted_with_the_limit() -> None:
    async def answer(_context: Any) -> registry.ListNodesResponse:
        return registry.ListNodesResponse()

    async with serving(answer, max_message_bytes=1000) as (_, channel):
        call: Any = channel.unary_unary(f"/{NODES}/ListNodes", request_serializer=lambda raw: raw)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(1001), timeout=5)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1000" in str(caught.value.details())


async def test_a_dead_address_is_unavailable() -> None:
    async with open_channel("127.0.0.1:9") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_nodes(channel)
    assert isinstance(to_error(caught.value), errors.UnavailableError)


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_context: Any) -> registry.ListNodesResponse:
        return registry.ListNodesResponse(revision=7)

    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving(answer) as (_, channel):
        assert (await list_nodes(channel)).revision == 7


async def test_a_taken_port_is_refused() -> None:
    async with serving() as (server, _):
        second = GrpcServer(address=f"127.0.0.1:{server.port}", service_names=())
        with pytest.raises(
            errors.UnavailableError, match=f"cannot listen on 127.0.0.1:{server.port}: Address already in use \\("
        ):
            await second.__aenter__()
        await second.stop(0)


async def check(channel: grpc.aio.Channel, service: str) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


async def test_health_is_not_serving_until_set_and_again_when_unset() -> None:
    serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with serving() as (server, channel):
        assert [await check(channel, name) for name in ("", NODES)] == [not_serving] * 2
        await server.set_serving(True)
        assert [await check(channel, name) for name in ("", NODES)] == [serving_] * 2
        await server.set_serving(False)
        assert await check(channel, NODES) == not_serving
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, "nope")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_service_may_be_impaired_alone() -> None:
    serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with serving() as (server, channel):
        await server.set_serving(True)
        await server.set_impaired(NODES, True)
        assert [await check(channel, name) for name in ("", NODES)] == [serving_, not_serving]
        await server.set_serving(False)
        await server.set_impaired(NODES, False)
        assert await check(channel, NODES) == not_serving
        await server.set_serving(True)
        assert await check(channel, NODES) == serving_


async def test_a_server_that_is_not_ready_is_alive() -> None:
    async with serving() as (_, channel):
        assert await check(channel, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await check(channel, LIVENESS) == health_pb2.HealthCheckResponse.SERVING


async def test_health_watches_follow_changes_whoever_else_leaves() -> None:
    async with serving() as (server, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        first, second = (stub.Watch(health_pb2.HealthCheckRequest(service=NODES), timeout=5) for _ in range(2))
        await first.read()
        await second.read()
        first.cancel()
        await asyncio.sleep(0.05)
        await server.set_serving(True)
        assert (await second.read()).status == health_pb2.HealthCheckResponse.SERVING
        await server.stop(1)
        assert (await second.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await second.read() == grpc.aio.EOF


async def test_a_health_watch_of_an_unknown_service_says_so() -> None:
    async with serving() as (_, channel):
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="nope"), timeout=5)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        call.cancel()


async def test_reflection_lists_the_services() -> None:
    async with serving() as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
        names = {service.name async for answer in call for service in answer.list_services_response.service}
    assert names == {NODES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_a_running_call_finishes_within_the_grace_and_new_ones_are_refused() -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def answer(_context: Any) -> registry.ListNodesResponse:
        started.set()
        await release.wait()
        return registry.ListNodesResponse(revision=7)

    async with serving(answer) as (server, channel):
        running = asyncio.create_task(list_nodes(channel))
        await started.wait()
        stopping = asyncio.create_task(server.stop(5))
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await list_nodes(channel)
        release.set()
        assert (await running).revision == 7
        await stopping


async def test_client_and_server_spans_are_in_the_callers_trace(spans: InMemorySpanExporter) -> None:
    async def answer(_context: Any) -> registry.ListNodesResponse:
        trace.get_tracer("test").start_span("inner").end()
        return registry.ListNodesResponse()

    async with serving(answer) as (_, channel):
        with trace.get_tracer("test").start_as_current_span("root"):
            await list_nodes(channel)
    inner, server, client, root = spans.get_finished_spans()
    assert [span.kind for span in (server, client)] == [trace.SpanKind.SERVER, trace.SpanKind.CLIENT]
    for child, parent in ((inner, server), (server, client), (client, root)):
        assert child.parent is not None
        assert child.parent.span_id == parent.context.span_id
        assert child.context.trace_id == root.context.trace_id


async def test_a_traced_stream_has_one_server_span_that_is_current_inside(spans: InMemorySpanExporter) -> None:
    async with serving(inference=Inference(2)) as (_, channel):
        with trace.get_tracer("test").start_as_current_span("root"):
            call = InferenceServiceStub(channel).ChatCompletions(router.ChatCompletionsRequest(), timeout=5)
            assert len([chunk async for chunk in call]) == 2
    by_name: dict[str, list[Any]] = {}
    for span in spans.get_finished_spans():
        by_name.setdefault(span.name.rpartition("/")[2], []).append(span)
    (server,), (root,) = by_name["ChatCompletions"], by_name["root"]
    assert server.parent.span_id == root.context.span_id
    assert {inner.parent.span_id for inner in by_name["inner"]} == {server.context.span_id}


async def test_cancelled_streams_end_their_handlers_and_spans_quietly(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    for turn in range(20):
        inference = Inference(None)
        async with serving(inference=inference) as (_, channel):
            call = InferenceServiceStub(channel).ChatCompletions(router.ChatCompletionsRequest(), timeout=5)
            for _ in range(turn % 4):
                await call.read()
            if turn % 4:
                call.cancel()
                async with asyncio.timeout(1):
                    await inference.closed.wait()
            call.cancel()
    ended = [span for span in spans.get_finished_spans() if span.name.endswith("ChatCompletions")]
    assert len(ended) >= 15
    assert complaints(caplog) == []


async def test_a_cancelled_call_ends_its_span_and_the_servers_work(spans: InMemorySpanExporter) -> None:
    cancelled = asyncio.Event()

    async def answer(_context: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(answer) as (_, channel):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await list_nodes(channel)
        async with asyncio.timeout(1):
            await cancelled.wait()
        await eventually(lambda: len(spans.get_finished_spans()) == 2)
    assert {span.kind for span in spans.get_finished_spans()} == {trace.SpanKind.CLIENT, trace.SpanKind.SERVER}


async def test_health_reflection_and_long_lived_streams_have_no_spans(spans: InMemorySpanExporter) -> None:
    class Watching(Partial):
        async def WatchNodes(self, request: Any, context: Any) -> AsyncIterator[Any]:
            yield registry.WatchNodesResponse(revision=1)

    server = GrpcServer(address="127.0.0.1:0", service_names=(NODES,))
    add_NodeServiceServicer_to_server(cast(Any, Watching()), server.server)
    async with server, open_channel(f"127.0.0.1:{server.port}") as channel:
        await check(channel, "")
        call = NodeServiceStub(channel).WatchNodes(registry.WatchNodesRequest(), timeout=5)
        assert [message.revision async for message in call] == [1]
    assert spans.get_finished_spans() == ()
