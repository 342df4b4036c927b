"""What a turn is taken for when its route is chosen, and what is claimed for it."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from backhaul_router.core.body import Endpoint
from backhaul_router.core.engines import Reply
from backhaul_router.core.errors import ApiError
from backhaul_router.core.lookup import session_key
from backhaul_router.core.routing.demand import Demand
from backhaul_router.core.routing.reports import EngineReport
from backhaul_router.core.routing.settings import parse_routing
from backhaul_router.core.tenants import parse_tenants
from backhaul_router.core.turn import Route
from backhaul_router.ports import Policy, TurnRequest
from tests.unit.router.ports import Bench, FakeStream, chat_request, ready
from tests.unit.router.test_tenants import FILE

LONG = "a" * 80_000
HELD = 20_000
IMAGE: Any = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "data:,"}}]


def bench_with(**options: Any) -> Bench:
    """A bench whose chat ``LONG b c`` finds what is held on d1; its router explains."""
    bench = Bench(**{"prefer": None, "policy": Policy(explain=True), **options})
    bench.publish(LONG, token_count=HELD)
    return bench


def completion(prompt: Any, **options: Any) -> TurnRequest:
    body = msgspec.json.encode({"model": "m", "prompt": prompt, "stream": True})
    return TurnRequest(Endpoint.COMPLETIONS, body, **{"tenant": "", "session_id": "s", **options})


def hold_session(bench: Bench, token_count: int) -> None:
    """Publishes what the session ``s`` left."""
    bench.publish("unused", token_count=token_count)
    bench.registry.pointers = [replace(bench.registry.pointers[-1], key=session_key(b"s"))]


async def demand_of(bench: Bench, request: TurnRequest) -> Demand:
    demand = (await bench.turns.explain(request)).demand
    assert demand is not None
    return demand


# How long a prompt is


@pytest.mark.parametrize("held", [0, 100, 200])
async def test_a_prompt_of_tokens_has_so_many(held: int) -> None:
    bench = bench_with()
    if held:
        hold_session(bench, held)
    demand = await demand_of(bench, completion([*range(150)]))
    assert (demand.token_count, demand.held_tokens) == (150, min(held, 150))
    assert demand.prefixes[0].token_count == 150


async def test_of_a_chat_only_what_is_new_is_estimated() -> None:
    bench = bench_with()
    demand = await demand_of(bench, chat_request(LONG, "b", "c" * 4_000))
    assert demand.held_tokens == HELD
    assert 1_000 <= demand.token_count - HELD <= 1_020


async def test_of_a_text_all_is_estimated_and_what_the_session_holds_is_part_of_it() -> None:
    bench = bench_with()
    hold_session(bench, 900)
    demand = await demand_of(bench, completion("x" * 4_000))
    assert (demand.token_count, demand.held_tokens) == (1_000, 900)


async def test_prompts_that_are_not_text_alone_say_nothing_of_how_long_text_is() -> None:
    bench = Bench()
    rate = bench.routing.rates.estimate("m", 10_000)
    await bench.run(completion([*range(3_000)]))
    await bench.chat(IMAGE)
    assert bench.routing.rates.estimate("m", 10_000) == rate
    await bench.chat(LONG)
    assert bench.routing.rates.estimate("m", 10_000) != rate
    assert len(bench.engines.prefills) == 3


# What proves a conversation, and who may know of it


async def test_a_session_says_nothing_of_the_text_it_goes_on_with() -> None:
    bench = bench_with()
    hold_session(bench, 20_000)
    request = completion("x" * 80_400)
    demand = await demand_of(bench, request)
    assert demand.held is not None
    assert not demand.held.proved
    assert (await bench.run(request)).answer.outcome.route is not Route.APPEND


async def test_another_text_of_a_session_is_not_taken_for_cached() -> None:
    bench = bench_with(nodes=ready("p1", "d1"))
    await bench.run(completion("x" * 4_000))
    cached = [
        bench.live.prefixes.cached(("p1", "p1-engine"), (await demand_of(bench, completion(text))).prefixes) > 0
        for text in ("x" * 4_000, "y" * 4_000)
    ]
    assert cached == [True, False]


async def test_tenants_know_nothing_of_what_is_cached_of_one_another() -> None:
    bench = bench_with(tenants=parse_tenants(FILE))
    red, blue = [
        {prefix.key for prefix in (await demand_of(bench, replace(chat_request("hi"), tenant=tenant))).prefixes}
        for tenant in ("red", "blue")
    ]
    assert red
    assert red.isdisjoint(blue)


# What is claimed


@pytest.mark.parametrize(
    ("prefer", "claims", "served"),
    [
        (Route.COLD, 0, ("cold", "route_off")),
        (Route.WARM, 1, ("warm", "")),
        (Route.APPEND, 0, ("append", "")),
    ],
    ids=str,
)
async def test_only_a_warm_turn_claims(prefer: Route, claims: int, served: tuple[str, str]) -> None:
    bench = bench_with(prefer=prefer)
    assert (await bench.chat(LONG, "b", "c")).served == served
    assert (len(bench.owner.claims), bench.owner.returned) == (claims, [])


async def test_what_is_slower_to_read_than_to_compute_is_not_claimed() -> None:
    bench = bench_with(routes={Route.COLD, Route.WARM})
    for key in [("p1", "p1-engine"), ("p2", "p2-engine")] * 20:
        bench.live.costs.note_prefill(key, computed=100, read=20_000, seconds=90.0)
        bench.live.costs.note_prefill(key, computed=20_000, read=0, seconds=0.5)
    assert (await bench.chat(LONG, "b", "c")).served == ("cold", "not_worth")
    assert bench.owner.claims == []


@pytest.mark.parametrize("options", [{"reuse": False}, {"n": 2}], ids=str)
async def test_a_turn_that_must_not_reuse_neither_appends_nor_leaves_anything(options: dict[str, Any]) -> None:
    bench = bench_with()
    assert (await bench.chat(LONG, "b", "c", **options)).served[0] == "cold"
    assert bench.registry.lookups == []
    [leg] = bench.engines.decodes
    assert not leg.body.get("kv_transfer_params", {}).get("backhaul", {}).get("keys")


async def test_an_engine_without_the_connector_that_computes_alone_is_told_nothing_it_would_keep_blocks_for() -> None:
    bench = Bench(nodes=ready("d1", connector=""), prefer=None)
    await bench.chat("short")
    [leg] = bench.engines.decodes
    assert "kv_transfer_params" not in leg.body


# Where there is no way


async def test_busy_engines_are_a_429_that_says_when_to_ask_again() -> None:
    settings = parse_routing('[decode]\nfilters = ["max-waiting"]\nmax_waiting = 0')
    bench = Bench(nodes=ready("p1", "d1"), settings=settings)
    bench.live.reports.take(("d1", "d1-engine"), EngineReport(running=1, waiting=1, kv_usage=0.1))
    for options in ({}, {"n": 2}):
        with pytest.raises(ApiError) as caught:
            await bench.chat("a", **options)
        assert (caught.value.status, caught.value.code) == (429, "engines_busy")
        assert caught.value.headers == {"retry-after": "1"}
    assert (bench.engines.prefills, bench.engines.decodes) == ([], [])


# What an engine is taken to be busy with


async def test_a_decode_engine_that_is_handed_nothing_is_busy_with_the_prompt() -> None:
    bench = Bench(nodes=ready("p1", "d1"))
    queued: list[int] = []

    async def computing() -> FakeStream:
        queued.append(bench.live.load.queued(("d1", "d1-engine")))
        return FakeStream()

    bench.engines.prefill_steps = [Reply(200, {}, b"{}")]
    bench.engines.decode_steps = [computing, computing]
    await bench.chat("a")
    await bench.chat("a")
    assert queued == [1, 0]


# What is explained


async def test_the_answer_says_why_its_turn_was_cold() -> None:
    bench = bench_with()
    done = await bench.run(replace(chat_request("new"), explain=True))
    explained = msgspec.json.decode(done.answer.headers["x-backhaul-explain"])
    assert (explained["route"], explained["miss"]) == ("cold", "first_turn")


@pytest.mark.parametrize(
    ("request_", "route", "miss"),
    [
        (chat_request(LONG, "b", "c"), "append", ""),
        (chat_request("new"), "cold", "first_turn"),
        (chat_request("unknown", "b", "c"), "cold", "not_found"),
        (chat_request(LONG, "b", "c", reuse=False), "cold", "reuse_off"),
        (chat_request(LONG, "b", "c", n=2), "cold", "unsupported_request"),
    ],
)
async def test_a_question_is_answered_with_what_the_turn_would_be(request_: TurnRequest, route: str, miss: str) -> None:
    bench = bench_with()
    explanation = await bench.turns.explain(request_)
    assert (explanation.route, explanation.miss) == (route, miss)
    assert (await bench.run(request_)).served == (route, miss)


async def test_a_question_gives_no_miss_for_what_would_be_read() -> None:
    bench = bench_with(prefer=Route.COLD)
    explanation = await bench.turns.explain(chat_request(LONG, "b", "c"))
    assert (explanation.route, explanation.miss) == ("cold", "route_off")
