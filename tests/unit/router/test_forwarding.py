"""What is learnt of a turn whose decode leg somebody else sends, from what is said of it afterwards."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from backhaul.envoy.v3 import access_log_pb2 as pb
from backhaul_router.access_log_service import AccessLog, Context
from backhaul_router.core.body import Endpoint
from backhaul_router.core.health.breakers import BreakerState
from backhaul_router.core.lookup import response_key
from backhaul_router.ext_proc_messages import destination
from backhaul_router.forwarding import Forwarded
from backhaul_router.observing import TurnObserver
from backhaul_router.ports import TurnRequest
from tests.unit.router.ports import Bench, chat_request, ready

LONG = "word " * 2_000
D1 = "d1", "d1-engine"
NODES = [("p1", "d1"), ("d1",)]
FIRST = {"first-byte-us": "50000000"}


def expected(bench: Bench) -> float:
    """Returns how long a decode engine is expected to take, seconds: with a hand-off where one can be."""
    costs = bench.live.costs
    return costs.decode_s(D1, moved=1_000) if len(bench.table) > 1 else costs.alone_s(D1, computed=1_000)


async def log(
    bench: Bench, *, stream: bool = True, tags: dict[str, str] = FIRST, served: str = "", flags: Sequence[str] = ()
) -> None:
    """Has one turn forwarded and logged."""
    async with bench.turns.forward(chat_request(LONG, stream=stream)) as forwarded:
        forwarded.taken()
    named = destination("d1:80", forwarded.leg.expectation).fields["envoy.lb"].struct_value
    named.update({"x-gateway-destination-endpoint-served": served})
    seen = pb.AccessLogCommon(custom_tags=tags, response_flags=pb.ResponseFlags(**dict.fromkeys(flags, True)))
    seen.metadata.filter_metadata["envoy.lb"].CopyFrom(named)
    await take(bench, seen)


async def take(bench: Bench, seen: pb.AccessLogCommon) -> None:
    async def messages() -> AsyncIterator[pb.StreamAccessLogsMessage]:
        entries = [pb.HTTPAccessLogEntry(), pb.HTTPAccessLogEntry(common_properties=seen)]
        logs = pb.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=entries)
        yield pb.StreamAccessLogsMessage(http_logs=logs)

    observer = TurnObserver(bench.clock, serves=bench.table.serves)
    service = AccessLog(table=bench.table, routing=bench.routing, observer=observer)
    await service.StreamAccessLogs(messages(), cast("Context", None))


@pytest.mark.parametrize("nodes", NODES)
async def test_how_long_a_decode_engine_took_to_begin_is_learnt_of_streams(nodes: Sequence[str]) -> None:
    bench = Bench(nodes=ready(*nodes))
    unknown = expected(bench)
    await log(bench)
    assert expected(bench) > unknown


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(
    "options", [{"stream": False}, {"tags": {}}, {"tags": {"first-byte-us": "-"}}, {"served": "d2:80"}]
)
async def test_of_any_other_answer_nothing_is(nodes: Sequence[str], options: dict[str, Any]) -> None:
    bench = Bench(nodes=ready(*nodes))
    unknown = expected(bench)
    await log(bench, **options)
    assert expected(bench) == unknown


async def test_a_prompt_that_queued_says_nothing_of_how_long_it_took_itself() -> None:
    bench = Bench(nodes=ready("d1"))
    unknown = expected(bench)
    async with bench.turns.forward(chat_request(LONG)):
        await log(bench)
    assert expected(bench) == unknown


def answered(forwarded: Forwarded) -> None:
    forwarded.taken()
    forwarded.answered(200, None, served="", streams=True, whole=False)


def ended(forwarded: Forwarded) -> None:
    answered(forwarded)
    forwarded.began(50.0)
    forwarded.ended()


def left(forwarded: Forwarded) -> None:
    answered(forwarded)
    forwarded.left()


def broken(forwarded: Forwarded) -> None:
    answered(forwarded)
    forwarded.broken()


@pytest.mark.parametrize(("tell", "waits"), [(ended, True), (left, False), (broken, False)])
async def test_what_a_turn_leaves_is_waited_for_if_it_has_ended(tell: Callable[[Forwarded], None], waits: bool) -> None:
    bench = Bench()
    async with bench.turns.forward(chat_request("a")) as forwarded:
        tell(forwarded)
    await bench.chat("a", "b", "c")
    assert (len(bench.registry.lookups) > 1) is waits


@pytest.mark.parametrize("nodes", NODES)
async def test_whoever_saw_a_stream_begin_teaches_when(nodes: Sequence[str]) -> None:
    bench = Bench(nodes=ready(*nodes))
    unknown = expected(bench)
    async with bench.turns.forward(chat_request(LONG, stream=True)) as forwarded:
        ended(forwarded)
    assert expected(bench) > unknown


async def test_a_responses_stream_says_nothing_of_when_its_engine_began() -> None:
    bench = Bench(nodes=ready("p1", "d1"))
    unknown = expected(bench)
    body = json.dumps({"model": "m", "input": LONG, "stream": True}).encode()
    async with bench.turns.forward(TurnRequest(Endpoint.RESPONSES, body, tenant="")) as forwarded:
        ended(forwarded)
    assert expected(bench) == unknown


async def test_a_response_is_waited_for_by_its_name_too() -> None:
    bench = Bench()
    body = json.dumps({"model": "m", "input": "hi", "stream": True}).encode()
    async with bench.turns.forward(TurnRequest(Endpoint.RESPONSES, body, tenant="")) as forwarded:
        ended(forwarded)
        leg = json.loads(forwarded.leg.body)
    label = leg["kv_transfer_params"]["backhaul"]
    assert bench.fresh.missing(label["scope"], [response_key(leg["request_id"])], ())


async def test_an_engine_that_kept_no_response_is_told_apart_behind_a_gateway_too() -> None:
    bench = Bench()
    asked: dict[str, Any] = {"model": "m", "input": "hi"}
    async with bench.turns.forward(TurnRequest(Endpoint.RESPONSES, json.dumps(asked).encode(), tenant="")) as forwarded:
        asked["previous_response_id"] = json.loads(forwarded.leg.body)["request_id"]
    async with bench.turns.forward(TurnRequest(Endpoint.RESPONSES, json.dumps(asked).encode(), tenant="")) as forwarded:
        forwarded.taken()
        forwarded.answered(404, None, served="", streams=False, whole=True)
        told = forwarded.whole(b'{"error": {"message": "not found", "param": "response_id", "code": 404}}')
    assert json.loads(told)["error"]["code"] == "previous_response_not_found"


async def test_of_an_engine_that_is_gone_nothing_is_learnt() -> None:
    bench = Bench(nodes=ready("p1", "d1"))
    unknown = expected(bench)
    async with bench.turns.forward(chat_request(LONG)) as forwarded:
        forwarded.taken()
    seen = pb.AccessLogCommon(custom_tags=FIRST)
    gone = destination("d1:80", msgspec.structs.replace(forwarded.leg.expectation, engine_id="gone"))
    seen.metadata.filter_metadata["envoy.lb"].CopyFrom(gone.fields["envoy.lb"].struct_value)
    await take(bench, seen)
    assert expected(bench) == unknown
    assert bench.live.costs.decode_s(("d1", "gone"), moved=1_000) == unknown


BROKEN = ["upstream_connection_termination", "upstream_remote_reset", "upstream_protocol_error"]


@pytest.mark.parametrize("flags", [*([flag] for flag in BROKEN), []])
async def test_an_engine_that_broke_off_an_answer_is_avoided(flags: Sequence[str]) -> None:
    bench = Bench(nodes=ready("p1", "d1"))
    await log(bench, flags=flags)
    [node] = [node for node in bench.table if node.node_id == "d1"]
    assert bench.live.breakers.state(node) is (BreakerState.OPEN if flags else BreakerState.CLOSED)
