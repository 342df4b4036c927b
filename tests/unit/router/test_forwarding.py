"""What is learnt of a turn whose decode leg somebody else sends."""

import json
from collections.abc import Callable, Sequence

import pytest

from backhaul_router.core.body import Endpoint
from backhaul_router.core.engines import Failure
from backhaul_router.core.lookup import response_key
from backhaul_router.forwarding import Forwarded
from backhaul_router.ports import TurnRequest
from tests.unit.router.ports import Bench, chat_request, ready

LONG = "word " * 2_000
D1 = "d1", "d1-engine"


def answered(forwarded: Forwarded, status: int = 200, *, served: str = "", streams: bool = True) -> None:
    forwarded.taken()
    failure = Failure.FAULT if status >= 500 else None
    forwarded.answered(status, failure, served=served, streams=streams, whole=False)


def streamed(forwarded: Forwarded) -> None:
    answered(forwarded, served="d1:80")
    forwarded.began(50.0)
    forwarded.ended()


def failed(forwarded: Forwarded) -> None:
    answered(forwarded, 500)
    forwarded.began(50.0)
    forwarded.ended()


def cut(forwarded: Forwarded) -> None:
    answered(forwarded)
    forwarded.began(50.0)
    forwarded.cut()


def answered_whole(forwarded: Forwarded) -> None:
    answered(forwarded, streams=False)
    forwarded.began(50.0)
    forwarded.ended()


def answered_by_another(forwarded: Forwarded) -> None:
    answered(forwarded, served="d2:80")
    forwarded.began(50.0)
    forwarded.ended()


async def expected_after(bench: Bench, tell: Callable[[Forwarded], None]) -> float:
    """Has one turn forwarded; returns how long a decode engine is expected to take for another one then, seconds."""
    async with bench.turns.forward(chat_request(LONG)) as forwarded:
        tell(forwarded)
    return expected(bench)


def expected(bench: Bench) -> float:
    """With a hand-off, where there is a prefill engine, else without."""
    costs = bench.live.costs
    return costs.decode_s(D1, moved=1_000) if len(bench.table) > 1 else costs.alone_s(D1, computed=1_000)


NODES = [("p1", "d1"), ("d1",)]


@pytest.mark.parametrize("nodes", NODES)
async def test_how_long_a_decode_engine_took_to_begin_is_learnt_of_streams_that_end(nodes: Sequence[str]) -> None:
    bench = Bench(nodes=ready(*nodes))
    unknown = expected(bench)
    assert await expected_after(bench, streamed) > unknown


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("tell", [failed, cut, answered_whole, answered_by_another])
async def test_of_any_other_answer_nothing_is(nodes: Sequence[str], tell: Callable[[Forwarded], None]) -> None:
    bench = Bench(nodes=ready(*nodes))
    unknown = expected(bench)
    assert await expected_after(bench, tell) == unknown


async def test_a_prompt_that_queued_says_nothing_of_how_long_it_took_itself() -> None:
    bench = Bench(nodes=ready("d1"))
    unknown = expected(bench)
    async with bench.turns.forward(chat_request(LONG)):
        assert await expected_after(bench, streamed) == unknown


@pytest.mark.parametrize(("tell", "waits"), [(streamed, True), (cut, False)])
async def test_what_a_turn_leaves_is_waited_for_if_it_has_ended(tell: Callable[[Forwarded], None], waits: bool) -> None:
    bench = Bench()
    async with bench.turns.forward(chat_request("a")) as forwarded:
        tell(forwarded)
    await bench.chat("a", "b", "c")
    assert (len(bench.registry.lookups) > 1) is waits


async def test_a_responses_stream_says_nothing_of_when_its_engine_began() -> None:
    bench = Bench(nodes=ready("p1", "d1"))
    unknown = expected(bench)
    body = json.dumps({"model": "m", "input": LONG, "stream": True}).encode()
    async with bench.turns.forward(TurnRequest(Endpoint.RESPONSES, body, tenant="")) as forwarded:
        streamed(forwarded)
    assert expected(bench) == unknown


async def test_a_response_is_waited_for_by_its_name_too() -> None:
    bench = Bench()
    body = json.dumps({"model": "m", "input": "hi", "stream": True}).encode()
    async with bench.turns.forward(TurnRequest(Endpoint.RESPONSES, body, tenant="")) as forwarded:
        streamed(forwarded)
        leg = json.loads(forwarded.leg.body)
    label = leg["kv_transfer_params"]["backhaul"]
    assert bench.fresh.missing(label["scope"], [response_key(leg["request_id"])], ())
