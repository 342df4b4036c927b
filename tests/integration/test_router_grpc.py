"""The gRPC face over a real channel."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.errors import DeadlineExceededError
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_router.grpc_service import InferenceService
from tests.fakes.engine import Leg, Step, answer, break_after, event_of, hang, refuse
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key

Stub: TypeAlias = "router_pb2_grpc.InferenceServiceAsyncStub"


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(body_limit=7_000_000) as stack:
        yield stack


@pytest.fixture
async def channel(stack: RouterStack) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Stub:
    return router_pb2_grpc.InferenceServiceStub(channel)


def request(*contents: str, **fields: Any) -> router_pb2.ChatCompletionsRequest:
    return router_pb2.ChatCompletionsRequest(body=json.dumps(chat_body(*contents, **fields)).encode())


async def collect(call: Any) -> tuple[router_pb2.Started, bytes]:
    """Returns the first message and the chunks put together."""
    steps = [step async for step in call]
    assert [step.WhichOneof("step") for step in steps[:1]] == ["started"]
    assert all(step.WhichOneof("step") == "chunk" for step in steps[1:])
    return steps[0].started, b"".join(step.chunk for step in steps[1:])


async def failure(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Returns code, reason and message of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), to_error(caught.value).reason, str(caught.value.details())


async def test_a_stream_has_the_bytes_of_http(stack: RouterStack, stub: Stub) -> None:
    over_http = await stack.chat("hi", stream=True)
    started, body = await collect(stub.ChatCompletions(request("hi", stream=True), timeout=5))
    assert body == over_http.body
    assert started.content_type.startswith("text/event-stream")
    assert (started.route, started.miss_reason, started.prompt_token_count) == ("cold", "first_turn", 200)
    assert started.source == ""


async def test_a_warm_turn_says_so(stack: RouterStack, stub: Stub) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    started, _ = await collect(stub.ChatCompletions(request("hi", "hello", "more"), timeout=5))
    assert (started.route, started.miss_reason, started.read_token_count) == ("warm", "", 128)
    assert started.source == "claimed"


async def test_a_whole_answer_is_one_document(stub: Stub) -> None:
    started, body = await collect(stub.ChatCompletions(request("hi"), timeout=5))
    assert json.loads(body)["choices"][0]["message"]["content"] == "Hello there"
    assert started.content_type.startswith("application/json")


async def test_the_session_can_be_a_field(stack: RouterStack, stub: Stub) -> None:
    body = json.dumps({"model": "tiny", "prompt": "once"}).encode()
    await collect(stub.Completions(router_pb2.CompletionsRequest(body=body, session_id="s1"), timeout=5))
    by_field = list(stack.directory.lookups[0].keys)
    await stack.post("/v1/completions", {"model": "tiny", "prompt": "once"}, {"x-session-id": "s1"})
    assert by_field == list(stack.directory.lookups[1].keys)


async def test_the_models(stub: Stub) -> None:
    reply = await stub.ListModels(router_pb2.ListModelsRequest(), timeout=5)
    assert json.loads(reply.body)["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, grpc.StatusCode.INVALID_ARGUMENT),
        (401, grpc.StatusCode.UNAUTHENTICATED),
        (403, grpc.StatusCode.UNAUTHENTICATED),
        (404, grpc.StatusCode.NOT_FOUND),
        (413, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (422, grpc.StatusCode.INVALID_ARGUMENT),
        (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (500, grpc.StatusCode.INTERNAL),
        (503, grpc.StatusCode.UNAVAILABLE),
        (504, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
async def test_engines_errors_have_their_code(
    stack: RouterStack, stub: Stub, status: int, code: grpc.StatusCode
) -> None:
    stack.decode.then(refuse(status, "engine says no"), refuse(status, "engine says no"))
    got, _, message = await failure(stub.ChatCompletions(request("hi", stream=True), timeout=5))
    assert (got, message) == (code, "engine says no")


def refuse_oddly(**error: Any) -> Step:
    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        return web.json_response({"error": error}, status=400)

    return step


@pytest.mark.parametrize("odd", [{"x": 1}, 7, ["a"]])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engines_error_with_odd_fields_has_its_code(
    stack: RouterStack, stub: Stub, role: str, odd: object
) -> None:
    engine = stack.prefill if role == "prefill" else stack.decode
    engine.then(refuse_oddly(message="no", param=odd, type=odd))
    code, _, message = await failure(stub.ChatCompletions(request("hi"), timeout=5))
    assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, "no")


async def test_an_engines_long_error_gets_through(stack: RouterStack, stub: Stub) -> None:
    stack.prefill.then(refuse_oddly(message="€" * 50_000))
    code, _, message = await failure(stub.ChatCompletions(request("hi"), timeout=5))
    assert (code, message[:3]) == (grpc.StatusCode.INVALID_ARGUMENT, "€€€")


@pytest.mark.parametrize("count", [-7, 2**31, 2**70])
async def test_an_engine_that_counts_wrong_fails_no_turn(stack: RouterStack, stub: Stub, count: int) -> None:
    stack.prefill.verdict = {"prompt": count, "local": count}
    stack.prefill.usage = {"prompt_tokens": count}
    started, _ = await collect(stub.ChatCompletions(request("hi"), timeout=5))
    assert (started.prompt_token_count, started.local_token_count) == (0, 0)


async def test_our_own_errors_have_their_code_and_reason(stack: RouterStack, stub: Stub) -> None:
    call = stub.ChatCompletions(router_pb2.ChatCompletionsRequest(body=b"{"), timeout=5)
    assert (await failure(call))[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    call = stub.ChatCompletions(request("hi", model="nope"), timeout=5)
    assert (await failure(call))[:2] == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    await stack.lose(stack.decode)
    call = stub.ChatCompletions(request("hi", model="tiny"), timeout=5)
    assert (await failure(call))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_that_breaks_is_internal(stack: RouterStack, stub: Stub) -> None:
    stack.decode.then(break_after([event_of("Hel")]))
    assert (await failure(stub.ChatCompletions(request("hi", stream=True), timeout=5)))[0] is grpc.StatusCode.INTERNAL


async def test_large_bodies_pass_up_to_the_limit(stub: Stub) -> None:
    await collect(stub.ChatCompletions(request("x" * 6_000_000), timeout=10))
    code, reason, message = await failure(stub.ChatCompletions(request("x" * 7_000_000), timeout=10))
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BODY_LIMIT")
    assert "7000000" in message


async def test_a_large_answer_comes_in_chunks_that_any_client_takes(stack: RouterStack) -> None:
    """gRPC's own clients take messages up to 4 MiB unless they are told otherwise."""
    stack.decode.then(answer({"text": "x" * 9_000_000}))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        _, body = await collect(
            router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(request("hi"), timeout=10)
        )
    assert json.loads(body) == {"text": "x" * 9_000_000}


async def test_a_turn_whose_deadline_has_passed_is_not_begun() -> None:
    """The deadline may pass between client and handler; no client of gRPC sends one that already has."""

    class Late:
        def time_remaining(self) -> float:
            return 0.0

        def invocation_metadata(self) -> tuple[()]:
            return ()

    nothing: Any = None
    service = InferenceService(
        turns=nothing,
        conversations=nothing,
        models=nothing,
        admission=nothing,
        body_limit_bytes=10,
        send_s=1.0,
    )
    late: Any = Late()
    with pytest.raises(DeadlineExceededError):
        _ = [step async for step in service.ChatCompletions(router_pb2.ChatCompletionsRequest(body=b"{}"), late)]


async def test_a_deadline_ends_prefill_and_decode_is_never_called(stack: RouterStack, stub: Stub) -> None:
    stack.prefill.then(hang())
    began = time.monotonic()
    code, _, _ = await failure(stub.ChatCompletions(request("hi"), timeout=0.5))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(stack.prefill.legs[0].closed_early.is_set)
    assert time.monotonic() - began < 1.5
    assert stack.decode.legs == []
    await eventually(lambda: stack.router.routing.live.load.total == 0)


async def test_without_a_deadline_it_works(stub: Stub) -> None:
    await collect(stub.ChatCompletions(request("hi", stream=True)))


async def test_a_cancelled_stream_ends_its_legs(stack: RouterStack, stub: Stub) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    for _ in range(20):
        call = stub.ChatCompletions(request("hi", stream=True))
        await call.read()
        await call.read()
        call.cancel()
    await eventually(lambda: stack.router.routing.live.load.total == 0, 1)
    await eventually(lambda: all(leg.closed_early.is_set() for leg in stack.decode.legs), 1)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_call_cancelled_while_it_waits_ends_its_leg(stack: RouterStack, stub: Stub, phase: str) -> None:
    engine = stack.prefill if phase == "prefill" else stack.decode
    engine.then(hang())
    call = stub.ChatCompletions(request("hi"))
    reading = asyncio.ensure_future(call.read())
    await eventually(lambda: bool(engine.legs))
    call.cancel()
    await asyncio.wait([reading])
    await eventually(engine.legs[0].closed_early.is_set, 1)
    assert reading.cancelled() or reading.exception() is not None


async def test_health_follows_readiness(stack: RouterStack, channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)

    async def serving() -> bool:
        check = health_pb2.HealthCheckRequest(service="backhaul.router.v1.InferenceService")
        reply = await health.Check(check, timeout=5)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    await eventually(serving)
    await stack.lose(stack.prefill)

    async def not_serving() -> bool:
        return not await serving()

    await eventually(not_serving)
