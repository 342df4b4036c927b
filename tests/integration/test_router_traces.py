"""One trace per turn, from the client's own into the engines' headers."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from backhaul.router.v1 import gateway_pb2 as pb
from backhaul.router.v1 import gateway_pb2_grpc, router_pb2_grpc
from backhaul_common.grpc_client import open_channel
from tests.fakes.engine import bare_500, hang
from tests.fakes.eventually import eventually
from tests.fakes.gateway import FakeGateway
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack
from tests.integration.test_router_gateway import SENDING, Stub, asked, send
from tests.integration.test_router_grpc import request
from tests.integration.test_router_turns import label_key

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
ORIGIN = f"00-{'c' * 32}-{'d' * 16}-01"
GATEWAY = "backhaul.router.v1.GatewayService"


@pytest.fixture
async def stack(spans: InMemorySpanExporter) -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


def tree(spans: InMemorySpanExporter, parent: ReadableSpan) -> dict[str, Any]:
    """Returns the names of a span's descendants, nested."""
    children = [
        span
        for span in spans.get_finished_spans()
        if span.parent is not None and parent.context is not None and span.parent.span_id == parent.context.span_id
    ]
    return {span.name: tree(spans, span) for span in sorted(children, key=lambda span: span.start_time or 0)}


def turn_in(spans: InMemorySpanExporter) -> ReadableSpan:
    (turn,) = [span for span in spans.get_finished_spans() if span.name == "turn"]
    return turn


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


async def test_a_warm_turn_is_one_tree(stack: RouterStack, spans: InMemorySpanExporter) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    headers = {"traceparent": PARENT, "tracestate": "vendor=x"}
    await stack.chat("hi", "hello", "more", headers=headers, stream=True)
    turn = turn_in(spans)
    find, claim = "/backhaul.registry.v1.IndexService/FindBlockSets", "/backhaul.agent.v1.BlockSetService/ClaimBlockSet"
    assert tree(spans, turn) == {
        "lookup": {find: {find: {}}},
        "claim": {claim: {claim: {}}},
        "prefill": {},
        "decode": {},
    }
    assert turn.context is not None
    assert f"{turn.context.trace_id:032x}" == TRACE_ID
    attributes = dict(turn.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["backhaul.route"] == "warm"
    assert attributes["backhaul.tokens.read"] == 128
    assert "backhaul.miss.reason" not in attributes


async def test_each_engine_gets_the_span_of_its_own_leg(stack: RouterStack, spans: InMemorySpanExporter) -> None:
    await stack.chat("hi", headers={"traceparent": PARENT, "tracestate": "vendor=x"})
    for engine, name in ((stack.prefill, "prefill"), (stack.decode, "decode")):
        (leg,), (span,) = engine.legs, named(spans, name)
        assert leg.headers["traceparent"] == f"00-{TRACE_ID}-{span_id(span)}-01"
        assert leg.headers["tracestate"] == "vendor=x"


async def test_a_repeated_leg_is_a_span_of_its_own(stack: RouterStack, spans: InMemorySpanExporter) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    stack.prefill.then(bare_500())
    await stack.chat("hi", "hello", "more")
    failed, repeated = sorted(named(spans, "prefill"), key=lambda span: span.start_time or 0)
    assert failed.status.status_code is StatusCode.ERROR
    assert repeated.status.status_code is StatusCode.UNSET
    routes = [dict(span.attributes or {})["backhaul.route"] for span in (failed, repeated)]
    assert routes == ["warm", "cold"]
    assert dict(turn_in(spans).attributes or {})["backhaul.miss.reason"] == "prefill_failed"


async def test_a_turn_whose_pair_is_set_apart_says_so(stack: RouterStack, spans: InMemorySpanExporter) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    stack.prefill.then(bare_500())
    await stack.chat("hi", "hello", "more")
    (event,) = [event for event in turn_in(spans).events if event.name == "pair set apart"]
    assert dict(event.attributes or {}) == {
        "backhaul.node.id": f"prefill-{stack.prefill.port}",
        "backhaul.source_node.id": f"decode-{stack.decode.port}",
    }


async def test_a_turn_whose_prompt_decode_computed_says_so(stack: RouterStack, spans: InMemorySpanExporter) -> None:
    await stack.lose(stack.prefill)
    await stack.chat("hi")
    assert dict(turn_in(spans).attributes or {})["backhaul.fallback"] is True


@pytest.mark.parametrize("value", ["", "nonsense", "00-0-0-00", f"00-{'0' * 32}-b7ad6b7169203331-01"])
async def test_a_malformed_traceparent_starts_a_new_trace(
    stack: RouterStack, spans: InMemorySpanExporter, value: str
) -> None:
    assert (await stack.chat("hi", headers={"traceparent": value})).status == 200
    turn = turn_in(spans)
    assert turn.parent is None
    assert turn.context is not None
    assert turn.context.trace_id != 0


async def test_a_grpc_turn_continues_the_callers_trace(stack: RouterStack, spans: InMemorySpanExporter) -> None:
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        _ = [step async for step in stub.ChatCompletions(request("hi"), metadata=(("traceparent", PARENT),), timeout=5)]
    turn = turn_in(spans)
    (server,) = named(spans, "/backhaul.router.v1.InferenceService/ChatCompletions")
    assert turn.parent is not None
    assert server.context is not None
    assert turn.parent.span_id == server.context.span_id
    assert f"{turn.parent.trace_id:032x}" == TRACE_ID


@pytest.mark.parametrize("way", ["of the request", "of the gateway"])
async def test_a_turn_behind_a_gateway_continues_the_trace(spans: InMemorySpanExporter, way: str) -> None:
    async with (
        router_stack(listen_ext_proc="127.0.0.1:0") as stack,
        FakeGateway(f"127.0.0.1:{stack.router.ext_proc_port}") as gateway,
    ):
        stack.hold()
        stack.publish(label_key("hi"), traceparent=ORIGIN)
        if way == "of the request":
            gateway.headers = {"traceparent": PARENT, "tracestate": "vendor=x"}
            gateway.call_metadata = (("traceparent", ORIGIN),)
        else:
            gateway.call_metadata = (("traceparent", PARENT), ("tracestate", "vendor=x"))
        got = await gateway.chat("hi", "hello", "more", stream=True)
        await eventually(lambda: bool(named(spans, "turn")))
        assert (got.status, got.headers["x-backhaul-route"]) == (200, "warm")
        for engine, name in ((stack.prefill, "prefill"), (stack.decode, "decode")):
            (leg,), (span,) = engine.legs, named(spans, name)
            assert leg.headers["traceparent"] == f"00-{TRACE_ID}-{span_id(span)}-01"
            assert leg.headers["tracestate"] == "vendor=x"
    turn = turn_in(spans)
    assert turn.parent is not None
    assert f"00-{turn.parent.trace_id:032x}-{turn.parent.span_id:016x}-01" == PARENT
    assert {*tree(spans, turn)} == {"lookup", "claim", "prefill", "decode"}
    assert [f"00-{link.context.trace_id:032x}-{link.context.span_id:016x}-01" for link in turn.links] == [ORIGIN]


async def test_a_planned_turn_is_one_trace_and_reports_are_linked_to_it(spans: InMemorySpanExporter) -> None:
    async with (
        router_stack(listen_gateway="127.0.0.1:0") as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.router.gateway_port}") as channel,
    ):
        stub: Stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        stack.hold()
        stack.publish(label_key("hi"), traceparent=ORIGIN)
        metadata = (("traceparent", PARENT),)
        plan = await stub.PlanTurn(asked("hi", "hello", "more", stream=True), metadata=metadata, timeout=5)
        steps: list[dict[str, Any]] = [{"sending": SENDING}, {"done": pb.ReportTurnRequest.Done()}]
        await stub.ReportTurn(pb.ReportTurnRequest(turn_id=plan.turn_id, **steps[0]), timeout=5)
        assert (await send(stack, plan))[0] == 200
        await stub.ReportTurn(pb.ReportTurnRequest(turn_id=plan.turn_id, **steps[1]), timeout=5)
        (leg,), (decode,) = stack.decode.legs, named(spans, "decode")
        assert leg.headers["traceparent"] == f"00-{TRACE_ID}-{span_id(decode)}-01"
    turn = turn_in(spans)
    planning, *reports = named(spans, f"/{GATEWAY}/PlanTurn") + named(spans, f"/{GATEWAY}/ReportTurn")
    assert turn.parent is not None
    assert planning.context is not None
    assert (turn.parent.span_id, f"{turn.parent.trace_id:032x}") == (planning.context.span_id, TRACE_ID)
    assert {*tree(spans, turn)} == {"lookup", "claim", "prefill", "decode"}
    assert [f"{link.context.span_id:016x}" for link in turn.links] == [ORIGIN.split("-")[2]]
    assert [event.name for event in turn.events] == ["sending", "done"]
    assert [[link.context for link in report.links] for report in reports] == [[turn.context]] * 2


async def test_what_is_told_an_owner_in_the_background_is_in_the_turns_trace(
    stack: RouterStack, spans: InMemorySpanExporter
) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    stack.prefill.verdict = {"read": 0, "verified": 0, "spent": False, "refused": "too_few_tokens"}
    await stack.chat("hi", "hello", "more", headers={"traceparent": PARENT})
    returning = "/backhaul.agent.v1.BlockSetService/ReturnBlockSet"
    await eventually(lambda: len(named(spans, returning)) == 2)
    assert {*tree(spans, turn_in(spans))} == {"lookup", "claim", "prefill", "decode", returning}
    assert {f"{span.context.trace_id:032x}" for span in spans.get_finished_spans() if span.context} == {TRACE_ID}


async def test_a_cancelled_turn_ends_all_its_spans_with_a_status(
    stack: RouterStack, spans: InMemorySpanExporter
) -> None:
    stack.prefill.then(hang())
    asking = asyncio.create_task(stack.chat("hi"))
    await eventually(lambda: bool(stack.prefill.legs))
    asking.cancel()
    await asyncio.wait([asking])
    await eventually(lambda: bool(named(spans, "turn")))
    for name in ("turn", "prefill"):
        (span,) = named(spans, name)
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "cancelled")


async def test_streams_cancelled_at_any_point_leave_no_span_open(
    stack: RouterStack, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    async def one(pause_s: float) -> None:
        async with stack.client.post(f"{stack.url}{CHAT}", json=chat_body("hi", stream=True)) as response:
            await response.read()
            await asyncio.sleep(pause_s)

    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        chance = random.Random(7)
        for _ in range(40):
            task = asyncio.create_task(one(0.0))
            call = stub.ChatCompletions(request("hi", stream=True))
            await asyncio.sleep(chance.uniform(0, 0.02))
            task.cancel()
            call.cancel()
            await asyncio.wait([task])
        await eventually(lambda: stack.router.routing.live.load.total == 0)
    assert "Failed to detach context" not in caplog.text
    await eventually(lambda: len(named(spans, "prefill")) >= len(stack.prefill.legs))
    await eventually(lambda: len(named(spans, "decode")) >= len(stack.decode.legs))


async def test_spans_tell_nothing_that_was_said(stack: RouterStack, spans: InMemorySpanExporter) -> None:
    await stack.chat("secret words", headers={"x-session-id": "secret-id", "authorization": "Bearer secret-key"})
    told = str([(span.name, dict(span.attributes or {}), span.events) for span in spans.get_finished_spans()])
    assert "secret" not in told
