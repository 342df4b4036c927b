"""Turns that go on from a response: who serves them, by which route, and what is kept of them."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from backhaul_router.core.body import Endpoint
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.engines import Failure
from backhaul_router.core.errors import ApiError
from backhaul_router.core.lookup import keys_of, response_key, session_key
from backhaul_router.core.nodes import Engine, NodeState
from backhaul_router.core.response_ids import keeper_of, response_id_of
from backhaul_router.core.turn import Route
from backhaul_router.ports import TurnRequest
from tests.fakes.other_forms import response_events
from tests.unit.router.bodies import response
from tests.unit.router.ports import Bench, Done, FakeStream, ready

USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
NONCE = "0" * 32


def request(given: Any = "hi", **fields: Any) -> TurnRequest:
    options = {name: fields.pop(name) for name in ("reuse", "endpoints", "session_id") if name in fields}
    body = msgspec.json.encode({"model": "m", "input": given, "stream": True, **fields})
    return TurnRequest(Endpoint.RESPONSES, body, tenant="", **options)


def answered(bench: Bench) -> None:
    """Lets the next decode leg answer."""
    bench.engines.decode_steps.append(FakeStream(*response_events({"model": "m"}, ["x"], USAGE)))


def name_from(bench: Bench, node_id: str = "d1") -> str:
    """Returns the name of a response that a node keeps."""
    node = bench.table.get(node_id)
    assert node is not None
    return response_id_of(node, "", NONCE)


async def go_on(bench: Bench, name: str, **fields: Any) -> Done:
    answered(bench)
    return await bench.run(request("more", previous_response_id=name, **fields))


def publish(bench: Bench, name: str, node_id: str = "d1", *, cached: bool = False, engine_id: str = "") -> None:
    """Publishes what the turn left that gave a response."""
    pointer = Pointer(response_key(name), "set", engine_id or f"{node_id}-engine", node_id, 128, b"", 64, b"i" * 16)
    bench.registry.pointers.append(replace(pointer, cached=cached))


async def test_the_keeper_appends_what_is_new_to_what_it_holds() -> None:
    bench = Bench(prefer=None)
    name = name_from(bench, "d2")
    publish(bench, name, "d2")
    done = await go_on(bench, name)
    assert done.served == ("append", "")
    (leg,) = bench.engines.decodes
    assert leg.node == "d2"
    assert leg.body["kv_transfer_params"]["backhaul"]["continues"] == [response_key(name)]
    assert bench.engines.prefills == []
    assert bench.owner.claims == []


async def test_what_the_turn_leaves_is_found_by_who_names_its_response() -> None:
    bench = Bench()
    await go_on(bench, name_from(bench))
    body = bench.engines.decodes[0].body
    assert body["kv_transfer_params"]["backhaul"]["keys"] == [response_key(body["request_id"])]
    assert bench.fresh.missing(body["kv_transfer_params"]["backhaul"]["scope"], [response_key(body["request_id"])], ())


@pytest.mark.parametrize(
    ("bench", "miss"),
    [
        (lambda: Bench(prefer=None), "not_found"),
        (lambda: Bench(prefer=Route.WARM), "not_found"),
        (lambda: Bench(prefer=None, nodes=ready("d1", "d2")), "not_found"),
    ],
    ids=["by estimate", "warm where it can be", "without a prefill node"],
)
async def test_where_nothing_is_held_the_keeper_computes_all_of_it(bench: Any, miss: str) -> None:
    bench = bench()
    done = await go_on(bench, name_from(bench, "d2"))
    assert done.served == ("cold", miss)
    assert done.answer.outcome.reuse
    assert [leg.node for leg in bench.engines.decodes] == ["d2"]
    assert bench.engines.prefills == []


async def test_where_nothing_may_be_appended_the_keeper_computes_too() -> None:
    bench = Bench(prefer=Route.WARM)
    name = name_from(bench)
    publish(bench, name)
    assert (await go_on(bench, name)).served == ("cold", "route_off")
    assert bench.owner.claims == []


async def test_what_is_merely_cached_is_not_asked_for() -> None:
    bench = Bench(nodes=ready("p1", second_chance=True) + ready("d1", second_chance=True))
    name = name_from(bench)
    publish(bench, name, cached=True)
    assert (await go_on(bench, name)).served == ("cold", "not_found")
    assert bench.owner.harvests == []
    assert bench.engines.prefills == []


async def test_without_reuse_nothing_is_looked_up_and_nothing_kept() -> None:
    bench = Bench()
    done = await go_on(bench, name_from(bench), reuse=False)
    assert done.served == ("cold", "reuse_off")
    assert done.answer.headers["x-backhaul-reuse"] == "off"
    assert bench.registry.lookups == []
    assert "kv_transfer_params" not in bench.engines.decodes[0].body


async def test_a_session_still_finds_the_turn() -> None:
    bench = Bench()
    await go_on(bench, name_from(bench), session_id="s")
    assert len(bench.engines.decodes[0].body["kv_transfer_params"]["backhaul"]["keys"]) == 2
    assert bench.registry.lookups[0][1] == (response_key(name_from(bench)),)


async def test_a_server_of_several_engines_appends_nothing_as_none_of_them_can_be_named() -> None:
    engines = tuple(Engine(f"e{rank}", "h", "w", "1", True, rank=rank) for rank in range(2))
    bench = Bench(prefer=None, nodes=ready("p1") + ready("d1", engines=engines))
    name = name_from(bench)
    publish(bench, name, engine_id="e1")
    assert (await go_on(bench, name)).served == ("cold", "unproved")


async def test_a_keeper_that_fails_is_not_replaced() -> None:
    bench = Bench()
    bench.engines.decode_steps = [Failure.UNAVAILABLE]
    with pytest.raises(ApiError) as caught:
        await go_on(bench, name_from(bench))
    assert caught.value.status == 503
    assert {leg.node for leg in bench.engines.decodes} == {"d1"}


async def test_a_keeper_whose_connection_broke_is_asked_again() -> None:
    bench = Bench()
    bench.engines.decode_steps = [Failure.DISCONNECTED]
    await go_on(bench, name_from(bench))
    assert [leg.node for leg in bench.engines.decodes] == ["d1", "d1"]


async def test_a_gateway_that_does_not_admit_the_keeper_gets_no_other_engine() -> None:
    bench = Bench()
    with pytest.raises(ApiError) as caught:
        await go_on(bench, name_from(bench), endpoints=frozenset({"d2:80"}))
    assert caught.value.status == 503
    assert bench.engines.decodes == []


@pytest.mark.parametrize("state", [NodeState.NOT_READY, NodeState.DRAINING])
async def test_a_keeper_that_takes_no_turns_is_waited_for(state: NodeState) -> None:
    bench = Bench()
    name = name_from(bench)
    (keeper,) = ready("d1", state=state, retiring=True)
    bench.table.change([keeper], [])
    with pytest.raises(ApiError) as caught:
        await go_on(bench, name)
    assert (caught.value.status, caught.value.headers) == (503, {"retry-after": "1"})


async def test_a_response_that_is_asked_for_again_elsewhere_is_named_after_who_gives_it() -> None:
    bench = Bench()
    bench.engines.decode_steps = [Failure.UNAVAILABLE]
    answered(bench)
    await bench.run(request())
    first, second = bench.engines.decodes
    assert first.node != second.node
    keepers = [keeper_of(leg.body["request_id"], "", bench.table) for leg in (first, second)]
    assert [keeper and keeper.node_id for keeper in keepers] == [first.node, second.node]
    assert second.body["kv_transfer_params"]["backhaul"]["keys"][-1] == response_key(second.body["request_id"])


async def test_a_turn_of_one_engine_says_that_reuse_is_off_though_something_failed_on_the_way() -> None:
    bench = Bench()
    bench.engines.decode_steps = [Failure.UNAVAILABLE]
    answered(bench)
    done = await bench.run(request(tools=[{"type": "mcp"}]))
    assert done.answer.headers["x-backhaul-reuse"] == "off"
    assert bench.engines.prefills == []


# Several sets, and no way to learn the prompt's tokens


async def test_of_several_sets_the_newest_turns_is_claimed_where_the_messages_prove_it() -> None:
    bench = Bench()
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant", "user")]
    for count, set_id in ((1, "older"), (3, "newer")):
        key = keys_of(response(said[:count], model="m"), None).own
        bench.registry.pointers.append(Pointer(key, set_id, "d1-engine", "d1", 128, b"", 64, b"i" * 16))
    answered(bench)
    done = await bench.run(request(said))
    assert done.served == ("warm", "")
    assert [claim.set_id for claim in bench.owner.claims] == ["newer"]
    assert bench.engines.tokenized == []


async def test_several_sets_of_one_turn_are_ambiguous() -> None:
    bench = Bench()
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    for set_id in ("one", "other"):
        key = keys_of(response(said[:1], model="m"), None).own
        bench.registry.pointers.append(Pointer(key, set_id, "d1-engine", "d1", 128, b"", 64, b"i" * 16))
    answered(bench)
    assert (await bench.run(request(said))).served == ("cold", "ambiguous")


async def test_what_only_a_session_leads_to_is_ambiguous_too() -> None:
    bench = Bench()
    for set_id in ("one", "other"):
        pointer = Pointer(session_key(b"s"), set_id, "d1-engine", "d1", 128, b"", 64, b"i" * 16)
        bench.registry.pointers.append(pointer)
    answered(bench)
    assert (await bench.run(request(session_id="s"))).served == ("cold", "ambiguous")
