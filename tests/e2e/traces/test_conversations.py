"""A conversation in traces: one for each turn, through all services, and each leads to the one before."""

import secrets
from collections.abc import Iterator
from contextlib import closing

import pytest

from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.stack.chat import Chat, Messages, Reply, answered, opening
from tests.e2e.stack.conftest import eventually_warm
from tests.fakes.otlp_collector import CollectedSpan, OtlpCollector

BUDGET = ("--lookup-budget-s", "0.5")


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def chats(collector: OtlpCollector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Chat]]:
    """Clients of two routers, by the route that each prefers."""
    options = StackOptions(
        state=tmp_path_factory.mktemp("traces"),
        prefill=[SimulatedEngine(flags=["--recompute-threshold", "1"])],
        decode=[SimulatedEngine(flags=["--recompute-threshold", "1"])],
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}", "OTEL_BSP_SCHEDULE_DELAY": "100"},
        router_flags=["--prefer", "warm", *BUDGET],
    )
    with Stack(options) as stack:
        appending = stack.add_router(["--prefer", "append", *BUDGET])
        chats = {"warm": Chat(stack.routers[0]), "append": Chat(appending)}
        with closing(chats["warm"].http), closing(chats["append"].http):
            eventually_warm(chats["warm"])
            yield chats


def sent(chat: Chat, messages: Messages) -> tuple[Reply, str]:
    """Runs a turn of a trace of its own; returns the reply, and the trace's id."""
    trace_id = secrets.token_hex(16)
    chat.http.headers["traceparent"] = f"00-{trace_id}-{secrets.token_hex(8)}-01"
    try:
        return chat.send(messages), trace_id
    finally:
        del chat.http.headers["traceparent"]


def test_a_turn_is_one_trace_and_leads_to_the_turn_that_it_goes_on_from(
    chats: dict[str, Chat], collector: OtlpCollector
) -> None:
    messages, turns = opening(), list[CollectedSpan]()
    for route, router in (("cold", "warm"), ("warm", "warm"), ("append", "append"), ("warm", "warm")):
        reply, trace_id = sent(chats[router], messages)
        assert (reply.status, reply.route) == (200, route), reply.raw
        messages = answered(messages, reply.text)
        turns.append(collector.turn(trace_id))

    first, *later = turns
    assert first.links == ()
    assert [turn.links for turn in later] == [((before.trace_id, before.span_id),) for before in turns[:-1]]
    assert [turn.attributes["backhaul.source_node.id"] for turn in later] == ["decode-1"] * 3


def test_a_warm_turns_trace_goes_through_every_service_down_to_etcds(
    chats: dict[str, Chat], collector: OtlpCollector
) -> None:
    messages = opening()
    reply, _ = sent(chats["warm"], messages)
    reply, trace_id = sent(chats["warm"], answered(messages, reply.text))
    services = {"backhaul-router", "backhaul-registry", "backhaul-node-agent"}

    def complete(found: list[CollectedSpan]) -> bool:
        return {span.service for span in found} == services and "turn" in {span.name for span in found}

    spans = collector.trace(trace_id, complete)
    assert reply.route == "warm"
    assert {span.service for span in spans} == services
    turn = collector.turn(trace_id)
    assert {span.name for span in spans if span.parent_id == turn.span_id} == {"lookup", "claim", "prefill", "decode"}
    assert "etcd.txn" in {span.name for span in spans if span.service == "backhaul-registry"}
    assert not any(span.failed for span in spans)
