"""One trace per turn, from the client's header to etcd and into both engines."""

import secrets

import pytest

from backhaul_local.engines import MODEL_NAME
from tests.e2e.stack.chat import Chat, opening
from tests.e2e.stack.conftest import conversation
from tests.fakes.otlp_collector import CollectedSpan, OtlpCollector

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

SERVICES = {"backhaul-router", "backhaul-registry", "backhaul-node-agent", "prefill", "decode"}


def test_a_warm_turn_is_one_trace_through_every_service_and_both_engines(chat: Chat, collector: OtlpCollector) -> None:
    messages, _ = conversation(chat)
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    chat.http.headers["traceparent"] = f"00-{trace_id}-{parent_id}-01"
    try:
        reply = chat.send(messages)
    finally:
        del chat.http.headers["traceparent"]
    assert reply.route == "warm"

    def complete(found: list[CollectedSpan]) -> bool:
        known = {parent_id, *(span.span_id for span in found)}
        return {span.service for span in found} >= SERVICES and {span.parent_id for span in found} <= known

    spans = collector.trace(trace_id, complete)

    assert {span.service for span in spans} == SERVICES, spans
    known = {span.span_id: span for span in spans}
    assert all(span.parent_id in known or span.parent_id == parent_id for span in spans)
    [turn] = [span for span in spans if span.parent_id == parent_id]
    assert (turn.service, turn.attributes["backhaul.route"]) == ("backhaul-router", "warm")
    below = {span.name for span in spans if span.parent_id == turn.span_id}
    assert {"lookup", "claim", "prefill", "decode"} <= below
    assert any(span.name.startswith("etcd") for span in spans if span.service == "backhaul-registry")
    for engine, leg in (("prefill", "prefill"), ("decode", "decode")):
        [own] = [
            span for span in spans if span.service == engine and known[span.parent_id].service == "backhaul-router"
        ]
        assert (own.name, known[own.parent_id].name) == ("llm_request", leg)
    assert reply.text not in str(spans)
    # The turn before was in no trace of its client's: its router began one.
    [(before_id, span_id)] = turn.links
    before = collector.turn(before_id)
    assert (before.span_id, before.parent_id, before.attributes["backhaul.route"]) == (span_id, "", "cold")


def test_the_trace_of_a_client_that_leaves_is_whole_and_says_so(chat: Chat, collector: OtlpCollector) -> None:
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    body = {"model": MODEL_NAME, "messages": opening(60), "max_tokens": 800, "min_tokens": 800, "stream": True}
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
    with chat.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())

    turn = collector.turn(trace_id)
    spans = collector.trace(trace_id, lambda found: "prefill" in {span.service for span in found})

    # vLLM makes no span for a request that is aborted.
    assert {span.service for span in spans} >= {"backhaul-router", "prefill"}
    assert {span.name for span in spans if span.failed} >= {"turn", "decode"}
    assert turn.attributes["backhaul.result"] in ("cancelled", "client_gone")
