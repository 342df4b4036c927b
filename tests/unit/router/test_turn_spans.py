"""What the spans of a turn tell: what became of it, what failed, and whose blocks it read."""

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, StatusCode

from backhaul_common.errors import NotFoundError
from backhaul_router.core.engines import EngineError, Failure
from backhaul_router.core.errors import ApiError
from backhaul_router.core.turn import Route
from backhaul_router.forwarding import Forwarded
from tests.unit.router.ports import Bench, FakeStream, Sent, chat_request, fault, warm_hand_off
from tests.unit.router.test_second_chances import cached_bench, publish

ORIGIN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def only(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    (span,) = named(spans, name)
    return span


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def links(span: ReadableSpan) -> list[str]:
    return [f"00-{link.context.trace_id:032x}-{link.context.span_id:016x}-01" for link in span.links]


def went_wrong(span: ReadableSpan) -> str:
    """How, by status and attribute alike; empty when it did not."""
    assert (span.status.status_code is StatusCode.ERROR) == bool(span.status.description)
    assert told(span).get("error.type") == span.status.description
    return span.status.description or ""


def label_of(leg: Sent) -> dict[str, Any]:
    label: dict[str, Any] = leg.body["kv_transfer_params"]["backhaul"]
    return label


# Links


async def test_the_decode_engine_is_told_which_span_the_turn_is(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    await bench.chat("a")
    context = only(spans, "turn").get_span_context()
    assert context is not None
    _, trace_id, span_id, _ = label_of(bench.engines.decodes[0])["traceparent"].split("-")
    assert (int(trace_id, 16), int(span_id, 16)) == (context.trace_id, context.span_id)


async def test_a_warm_turn_is_linked_to_the_turn_whose_blocks_it_read(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    bench.publish("a", traceparent=ORIGIN)
    await bench.chat("a", "b", "c")
    turn = only(spans, "turn")
    assert links(turn) == [ORIGIN]
    assert (told(turn)["backhaul.source_node.id"], told(turn)["backhaul.source"]) == ("d1", "claimed")


async def test_an_appended_turn_is_linked_to_the_turn_that_it_goes_on_from(spans: InMemorySpanExporter) -> None:
    bench = Bench(prefer=Route.APPEND)
    bench.publish("a", traceparent=ORIGIN)
    await bench.chat("a", "b", "c")
    turn = only(spans, "turn")
    assert links(turn) == [ORIGIN]
    assert (told(turn)["backhaul.node.id"], told(turn)["backhaul.source_node.id"]) == ("d1", "d1")


async def test_a_turn_with_a_second_chance_is_linked_to_the_turn_whose_blocks_are_cached(
    spans: InMemorySpanExporter,
) -> None:
    bench = cached_bench()
    bench.registry.pointers.clear()
    publish(bench, traceparent=ORIGIN)
    await bench.chat("a", "b", "c")
    turn = only(spans, "turn")
    assert links(turn) == [ORIGIN]
    assert (told(turn)["backhaul.source_node.id"], told(turn)["backhaul.source"]) == ("d1", "cached")


async def test_a_turn_that_found_blocks_and_read_none_is_linked_to_none(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    bench.publish("a", traceparent=ORIGIN)
    bench.engines.prefill_steps = [warm_hand_off(read=0, verified=0, spent=False, refused="digest")]
    await bench.chat("a", "b", "c")
    turn = only(spans, "turn")
    assert links(turn) == []
    assert told(turn)["backhaul.route"] == "cold"
    assert "backhaul.source_node.id" not in told(turn)


@pytest.mark.parametrize("origin", ["", "nonsense", f"00-{'0' * 32}-b7ad6b7169203331-01"])
async def test_a_turn_whose_origin_is_not_known_is_linked_to_none(spans: InMemorySpanExporter, origin: str) -> None:
    bench = Bench()
    bench.publish("a", traceparent=origin)
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")
    assert links(only(spans, "turn")) == []


# Attributes


async def test_a_turn_says_how_it_was_served(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    bench.publish("a")
    await bench.chat("a", "b", "c")
    got = told(only(spans, "turn"))
    assert got.pop("backhaul.estimate.first_chunk") > 0
    assert got == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 0.0,
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.cache_read.input_tokens": 128,
        "backhaul.route": "warm",
        "backhaul.source": "claimed",
        "backhaul.result": "ok",
        "backhaul.node.id": got["backhaul.node.id"],
        "backhaul.source_node.id": "d1",
        "backhaul.tokens.prompt": 200,
        "backhaul.tokens.local": 16,
        "backhaul.tokens.read": 112,
    }
    assert got["backhaul.node.id"] == bench.engines.decodes[0].node


async def test_a_long_name_of_a_model_that_nobody_serves_is_cut(spans: InMemorySpanExporter) -> None:
    bench = Bench(nodes=[])
    with pytest.raises(ApiError):
        await bench.chat("a", model="m" * 10_000)
    assert len(told(only(spans, "turn"))["gen_ai.request.model"]) < 300


async def test_legs_name_their_engine_and_its_answer(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    await bench.chat("a")
    for leg, name in ((bench.engines.prefills[0], "prefill"), (bench.engines.decodes[0], "decode")):
        assert told(only(spans, name)) == {
            "backhaul.node.id": leg.node,
            "backhaul.engine.id": f"{leg.node}-engine",
            "backhaul.route": "cold",
            "http.response.status_code": 200,
        }


async def test_what_nobody_counted_is_not_said(spans: InMemorySpanExporter) -> None:
    bench = Bench(prefer=Route.APPEND)
    bench.publish("a")
    bench.engines.decode_steps = [FakeStream(b"{}", headers={"content-type": "application/json"})]
    await bench.chat("a", "b", "c", stream=False)
    got = told(only(spans, "turn"))
    assert not [name for name in got if name.startswith("gen_ai.usage") or name.endswith((".stream", "_first_chunk"))]


# What fails


async def test_a_decode_leg_that_failed_says_how_and_the_turn_that_worked_all_the_same_does_not(
    spans: InMemorySpanExporter,
) -> None:
    bench = Bench()
    bench.engines.decode_steps = [FakeStream(b"{}", status=503, headers={"content-type": "application/json"})]
    await bench.chat("a")
    first, second = named(spans, "decode")
    assert [went_wrong(span) for span in (first, second, only(spans, "turn"))] == ["unavailable", "", ""]


@pytest.mark.parametrize(("failure", "how"), [(Failure.REFUSED, "refused"), (Failure.TIMEOUT, "timeout")])
async def test_a_prefill_leg_says_how_it_failed(spans: InMemorySpanExporter, failure: Failure, how: str) -> None:
    bench = Bench()
    bench.publish("a")
    bench.engines.prefill_steps = [failure]
    await bench.chat("a", "b", "c")
    first, second = named(spans, "prefill")
    assert [went_wrong(span) for span in (first, second, only(spans, "turn"))] == [how, "", ""]


async def test_a_turn_that_fails_for_good_says_so(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    bench.engines.decode_steps = [Failure.TIMEOUT] * 2
    with pytest.raises(ApiError):
        await bench.chat("a")
    turn = only(spans, "turn")
    assert (went_wrong(turn), told(turn)["backhaul.result"]) == ("504", "error_504")


async def test_an_engines_last_error_is_the_turns(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    answer = FakeStream(b"{}", status=500, headers={"content-type": "application/json"})
    bench.engines.decode_steps = [answer] * 2
    await bench.chat("a")
    turn = only(spans, "turn")
    assert (went_wrong(turn), told(turn)["backhaul.result"]) == ("failed", "failed")


async def test_a_request_that_the_engine_refuses_is_no_fault(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    bench.engines.prefill_steps = [fault(400)]
    with pytest.raises(ApiError):
        await bench.chat("a")
    assert {went_wrong(span) for span in spans.get_finished_spans()} == {""}
    assert told(only(spans, "turn"))["backhaul.result"] == "error_400"


async def test_a_stream_that_breaks_is_seen_on_its_leg_too(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    bench.engines.decode_steps = [FakeStream(b"data: 1\n\n", breaks=Failure.DISCONNECTED)]
    await bench.chat("a")
    assert (went_wrong(only(spans, "decode")), went_wrong(only(spans, "turn"))) == ("disconnected", "broken")


async def test_so_is_one_of_a_client_that_is_told_by_an_error(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    bench.engines.decode_steps = [FakeStream(b"data: 1\n\n", breaks=Failure.DISCONNECTED)]

    async def read() -> None:
        async with bench.turns.run(chat_request("a")) as answer:
            assert answer.stream is not None
            await answer.stream.read()

    with pytest.raises(EngineError):
        await read()
    assert went_wrong(only(spans, "decode")) == "disconnected"
    [noted] = bench.journal.since(0, most=1)
    assert (told(only(spans, "turn"))["backhaul.result"], noted.result) == ("broken", "broken")


async def test_a_client_that_leaves_is_seen_on_all_that_it_leaves(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    with pytest.raises(ConnectionResetError):
        await bench.leave("a")
    turn = only(spans, "turn")
    assert (went_wrong(turn), told(turn)["backhaul.result"]) == ("ConnectionResetError", "client_gone")


async def test_a_refused_claim_says_why(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    bench.publish("a")
    bench.owner.failure = NotFoundError("SET_UNKNOWN", "no such set")
    await bench.chat("a", "b", "c")
    assert went_wrong(only(spans, "claim")) == "SET_UNKNOWN"
    assert told(only(spans, "turn"))["backhaul.miss.reason"] == "claim:set_unknown"


# What somebody else sends


@pytest.mark.parametrize(
    ("tell", "how"),
    [
        pytest.param(lambda leg: leg.ended(), "", id="ended"),
        pytest.param(Forwarded.broken, "broken", id="broken"),
        pytest.param(Forwarded.left, "cancelled", id="left"),
        pytest.param(Forwarded.given_up, "given_up", id="given up"),
    ],
)
async def test_a_leg_that_somebody_else_sends_ends_with_what_is_told_of_it(
    spans: InMemorySpanExporter, tell: Callable[[Forwarded], None], how: str
) -> None:
    bench = Bench()
    async with bench.turns.forward(chat_request("a")) as forwarded:
        forwarded.taken()
        forwarded.answered(200, None, served="", streams=True, whole=False)
        tell(forwarded)
    leg = went_wrong(only(spans, "decode"))
    assert (leg.replace("disconnected", "broken"), went_wrong(only(spans, "turn"))) == (how, how)
    assert told(only(spans, "turn"))["backhaul.result"] == (how or "ok")


async def test_a_leg_that_somebody_else_could_not_send_says_so(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    async with bench.turns.forward(chat_request("a")) as forwarded:
        forwarded.taken()
        forwarded.answered(503, Failure.REFUSED, served="", streams=False, whole=False)
    leg = only(spans, "decode")
    assert (went_wrong(leg), went_wrong(only(spans, "turn"))) == ("refused", "failed")
    assert "http.response.status_code" not in told(leg)


async def test_a_call_that_tells_of_a_turn_is_linked_to_it(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    async with bench.turns.forward(chat_request("a")) as forwarded:
        with trace.get_tracer("test").start_as_current_span("report"):
            forwarded.told("sending")
    turn, report = only(spans, "turn"), only(spans, "report")
    assert [link.context for link in report.links] == [turn.get_span_context()]
    assert [event.name for event in turn.events] == ["sending"]


# What goes on in the background


async def test_what_is_given_back_in_the_background_is_part_of_the_turn(spans: InMemorySpanExporter) -> None:
    bench = Bench()
    current: list[SpanContext] = []
    bench.owner.on_release = lambda: current.append(trace.get_current_span().get_span_context())
    bench.engines.decode_steps = [Failure.REFUSED] * 2
    with pytest.raises(ApiError):
        await bench.chat("a")
    assert len(current) == 2
    assert current == [only(spans, "turn").get_span_context()] * 2
