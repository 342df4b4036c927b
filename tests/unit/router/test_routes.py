"""Which route a turn takes over its engines, what it takes along, and what is left of it when it fails."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from backhaul_common.errors import NotFoundError
from backhaul_router.core.engines import Failure, Reply
from backhaul_router.core.errors import ApiError
from backhaul_router.core.health.retries import SHARE, SPARE
from backhaul_router.core.lookup import keys_of, session_key
from backhaul_router.core.nodes import Node
from backhaul_router.core.routing.settings import LimitSettings, RoutingSettings
from backhaul_router.core.routing.target import RANK_HEADER, Target
from backhaul_router.core.turn import Route
from backhaul_router.explaining import HEADER
from backhaul_router.ports import Policy
from tests.unit.router.bodies import chat
from tests.unit.router.ports import Bench, FakeStream, Sent, chat_request, fault, ready

LONG = "a" * 80_000
"""About as many bytes as `HELD` tokens have."""
HELD = 20_000


def bench_with(prefer: Route | None = None, *, node_id: str = "d1", engine_id: str = "", **options: Any) -> Bench:
    """A bench whose turn ``LONG b c`` finds what is held on one decode node."""
    bench = Bench(prefer=prefer, **options)
    bench.publish(LONG, node_id=node_id, token_count=HELD, **({"engine_id": engine_id} if engine_id else {}))
    return bench


async def route_of(bench: Bench, **fields: Any) -> tuple[str, str]:
    """Runs the turn; returns its route and miss reason."""
    return (await bench.chat(LONG, "b", "c", **fields)).served


def use_up_the_budget(bench: Bench) -> None:
    """Leaves nothing to repeat, not even for the fifth of a repetition that the next turn brings."""
    bench.routing.retries.began()
    while bench.routing.retries.allowed():
        pass


def two_ranks(*node_ids: str) -> list[Node]:
    """Ready nodes of two engines each."""
    return [_with_a_second_engine(node) for node in ready(*node_ids)]


def _with_a_second_engine(node: Node) -> Node:
    first = node.engines[0]
    return replace(node, engines=(first, replace(first, engine_id=f"{first.engine_id}-1", rank=1)))


def _without_the_connector(node: Node) -> Node:
    return replace(node, engines=(replace(node.engines[0], connector_version="", reuse=False),))


# Append


@pytest.mark.parametrize("holder", ["d1", "d2"])
async def test_the_holder_alone_is_asked_for_what_is_new_and_nothing_is_claimed(holder: str) -> None:
    bench = bench_with(node_id=holder)
    assert await route_of(bench) == ("append", "")
    assert [leg.node for leg in bench.engines.decodes] == [holder]
    assert bench.engines.prefills == []
    assert bench.owner.claims == []


async def test_the_next_turn_finds_what_an_appended_one_leaves() -> None:
    bench = bench_with()
    await route_of(bench)
    keys = keys_of(chat(LONG, "b", "c", model="m"), None)
    label = bench.engines.decodes[0].body["kv_transfer_params"]["backhaul"]
    assert (label["keys"], label["continues"]) == ([*keys.label], [*keys.find])


async def test_what_only_a_session_id_led_to_is_read_where_it_is_verified_and_not_appended() -> None:
    bench = bench_with()
    bench.registry.pointers = [replace(pointer, key=session_key(b"s")) for pointer in bench.registry.pointers]
    assert await route_of(bench, session_id="s") == ("warm", "")


async def test_a_holder_does_not_compute_more_than_it_may() -> None:
    bench = bench_with(settings=RoutingSettings(limits=LimitSettings(append_tokens=0)))
    assert await route_of(bench) == ("warm", "")


async def test_a_holder_that_fails_is_left_alone_while_another_node_is_well() -> None:
    bench = bench_with()
    bench.live.breakers.failed(ready("d1")[0], Failure.REFUSED)
    assert await route_of(bench) == ("cold", "holder_avoided")
    assert [leg.node for leg in bench.engines.decodes] == ["d2"]


@pytest.mark.parametrize("step", [Failure.REFUSED, Failure.DISCONNECTED, Failure.TIMEOUT, FakeStream(status=500)])
@pytest.mark.parametrize("nodes", [("p1", "d1"), ("p1", "d1", "d2")], ids=lambda nodes: f"{len(nodes)} nodes")
async def test_an_append_that_fails_is_repeated_cold_as_if_nothing_was_held(nodes: Sequence[str], step: Any) -> None:
    bench, anew = bench_with(nodes=ready(*nodes)), Bench(nodes=ready(*nodes), prefer=None)
    bench.engines.decode_steps = [step]
    done, cold = await bench.chat(LONG, "b", "c"), await anew.chat(LONG, "b", "c")
    assert done.served == ("cold", "decode_failed")
    assert [leg.node for leg in bench.engines.decodes] == ["d1", nodes[-1]]
    assert [leg.warm for leg in bench.engines.prefills] == [False]
    assert done.answer.outcome.estimate_s == pytest.approx(cold.answer.outcome.estimate_s, rel=0.02)


# Which routes there are


@pytest.mark.parametrize(
    ("routes", "served"),
    [
        ({Route.COLD}, ("cold", "route_off")),
        ({Route.COLD, Route.WARM}, ("warm", "")),
        ({Route.COLD, Route.APPEND}, ("append", "")),
    ],
)
async def test_a_route_that_is_off_is_not_taken(routes: set[Route], served: tuple[str, str]) -> None:
    assert await route_of(bench_with(routes=routes)) == served


async def test_a_turn_whose_claim_is_refused_goes_where_a_cold_one_goes() -> None:
    bench = bench_with(Route.WARM)
    bench.owner.failure = NotFoundError("SET_NOT_FOUND", "")
    holder = Target(ready("d1")[0], ready("d1")[0].engines[0])
    with ExitStack() as busy:
        for _ in range(5):
            busy.enter_context(bench.live.load.running(holder))
        assert await route_of(bench) == ("cold", "claim:set_not_found")
    assert [leg.warm for leg in bench.engines.prefills] == [False]
    assert [leg.node for leg in bench.engines.decodes] == ["d2"]


# Ranks


async def test_every_leg_says_which_engine_of_a_server_it_is_for() -> None:
    bench = Bench(nodes=two_ranks("p1", "d1"), prefer=None)
    for turn in range(4):
        await bench.chat(f"{turn}{LONG}")
    for legs in (bench.engines.prefills, bench.engines.decodes):
        assert {leg.headers.get(RANK_HEADER) for leg in legs} == {"0", "1"}


async def test_an_append_is_for_the_very_engine_that_holds() -> None:
    for engine_id, rank in (("d1-engine", "0"), ("d1-engine-1", "1")):
        bench = bench_with(nodes=two_ranks("p1", "d1"), engine_id=engine_id)
        assert await route_of(bench) == ("append", "")
        assert bench.engines.decodes[0].headers[RANK_HEADER] == rank


async def test_a_server_of_which_one_engine_is_known_is_told_its_rank_where_blocks_are_held_and_else_picks() -> None:
    """It may have others, which the router is not told of."""
    bench = Bench(nodes=two_ranks("p1", "d1"))
    bench.table.replace(replace(node, engines=node.engines[:1]) for node in bench.table)
    await bench.chat("a")
    assert {leg.headers.get(RANK_HEADER) for leg in (*bench.engines.prefills, *bench.engines.decodes)} == {"0"}
    bench = Bench(nodes=[_without_the_connector(node) for node in ready("p1", "d1")])
    await bench.chat("a")
    assert not any(RANK_HEADER in leg.headers for leg in (*bench.engines.prefills, *bench.engines.decodes))


async def test_turns_that_are_computed_at_once_do_not_all_go_to_the_decode_engine_that_is_a_little_faster() -> None:
    bench = Bench(nodes=ready("p1", "d1", "d2"))
    first, second = (Target(node, node.engines[0]) for node in ready("d1", "d2"))
    for _ in range(5):
        bench.live.costs.note_decode(first.key, moved=100, seconds=0.010)
        bench.live.costs.note_decode(second.key, moved=100, seconds=0.012)
    bench.engines.connected.clear()
    turns = [asyncio.create_task(bench.chat(name)) for name in "abcd"]
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(bench.engines.prefills) == 4
    assert [bench.live.load.count(target.key) for target in (first, second)] == [2, 2]
    bench.engines.connected.set()
    await asyncio.gather(*turns)
    assert sorted(leg.node for leg in bench.engines.decodes) == ["d1", "d1", "d2", "d2"]
    assert bench.live.load.total == 0


# How much is repeated


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_where_every_leg_fails_few_are_repeated(role: str) -> None:
    bench = Bench(policy=Policy(prefill_fallback="strict"))
    turn_count = 30
    legs: list[Sent]
    if role == "prefill":
        legs, bench.engines.prefill_steps = bench.engines.prefills, [Failure.DISCONNECTED] * 100
    else:
        legs, bench.engines.decode_steps = bench.engines.decodes, [Failure.DISCONNECTED] * 100
    for _ in range(turn_count):
        with pytest.raises(ApiError):
            await bench.chat("a")
    most = turn_count * (1 + SHARE) + SPARE
    assert most - 1 < len(legs) <= most, "a leg that is not repeated uses nothing up"


@pytest.mark.parametrize(
    ("prefer", "leg"), [(Route.WARM, "prefill"), (Route.WARM, "decode"), (Route.APPEND, "decode")], ids=str
)
async def test_a_shortcut_that_fails_is_repeated_however_much_was(prefer: Route, leg: str) -> None:
    bench = bench_with(prefer)
    use_up_the_budget(bench)
    if leg == "prefill":
        legs, bench.engines.prefill_steps = bench.engines.prefills, [Failure.DISCONNECTED]
    else:
        legs, bench.engines.decode_steps = bench.engines.decodes, [Failure.DISCONNECTED]
    assert await route_of(bench) == ("cold", f"{leg}_failed")
    assert len(legs) == 2


# What is learnt


@pytest.mark.parametrize("reply", [fault(500), Reply(200, {}, b'{"choices": [{"finish_reason": "error"}]}')])
async def test_a_prefill_leg_that_fails_teaches_nothing(reply: Reply) -> None:
    bench = Bench(nodes=ready("p1", "d1"))
    costs, key = bench.live.costs, ("p1", "p1-engine")
    unknown = costs.prefill_s(key, computed=1_000, read=0)

    async def late() -> Reply:
        bench.clock.now += 50
        return reply

    bench.engines.prefill_steps = [late]
    with pytest.raises(ApiError):
        await bench.chat(LONG)
    assert costs.prefill_s(key, computed=1_000, read=0) == unknown
    await bench.chat(LONG)
    assert costs.prefill_s(key, computed=1_000, read=0) != unknown


@pytest.mark.parametrize("status", [400, 500])
async def test_a_decode_leg_that_fails_teaches_nothing(status: int) -> None:
    bench = Bench(nodes=ready("d1"))
    costs, key = bench.live.costs, ("d1", "d1-engine")
    unknown = costs.alone_s(key, computed=1_000)

    async def late() -> FakeStream:
        bench.clock.now += 50
        return FakeStream(b"{}", status=status)

    bench.engines.decode_steps = [late]
    assert (await bench.chat(LONG)).answer.status == status
    assert costs.alone_s(key, computed=1_000) == unknown
    await bench.chat(LONG)
    assert costs.alone_s(key, computed=1_000) != unknown


# Explanations


@pytest.mark.parametrize(("allowed", "asked"), [(False, False), (False, True), (True, False), (True, True)])
async def test_only_a_router_that_explains_and_is_asked_tells_why(allowed: bool, asked: bool) -> None:
    bench = bench_with(policy=Policy(explain=allowed))
    done = await bench.run(replace(chat_request(LONG, "b", "c"), explain=asked))
    assert (HEADER in done.answer.headers) is (allowed and asked)


async def test_a_question_is_refused_where_nothing_is_explained_and_has_no_effect_elsewhere() -> None:
    request = chat_request(LONG, "b", "c")
    with pytest.raises(ApiError) as caught:
        await bench_with().turns.explain(request)
    assert (caught.value.status, caught.value.code) == (412, "explain_off")
    bench = bench_with(Route.WARM, policy=Policy(explain=True))
    assert (await bench.turns.explain(request)).route == "warm"
    await asyncio.sleep(0)
    assert (bench.owner.claims, bench.engines.prefills, bench.engines.decodes) == ([], [], [])
