"""Nodes of several models, builds and rollouts: legs of one turn never go to engines that cannot exchange blocks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from backhaul_router.core.lookup import keys_of
from backhaul_router.core.nodes import Engine, Node
from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.turn import Route
from backhaul_router.explaining import TurnExplanation
from backhaul_router.ports import Policy
from tests.unit.router.bodies import chat
from tests.unit.router.ports import Bench, Done, chat_request, ready

TURNS = 100

BUILDS: Mapping[str, Mapping[str, Any]] = {
    "NIXL hash": {"compatibility_hash": "other"},
    "weights": {"weights_digest": "other"},
    "block size": {"block_size": 64},
    "tensor-parallel size": {"tp_size": 3},
}
"""What keeps engines of one model apart, whatever the turn."""
VERSION: dict[str, Any] = {"connector_version": "2"}
"""Keeps them apart for reads: a hand-off is vLLM's own."""

apart = pytest.mark.parametrize("other", BUILDS.values(), ids=BUILDS.keys())


def build(*node_ids: str, models: tuple[str, ...] = ("m",), **of_engine: Any) -> list[Node]:
    """Returns nodes of one build; ``of_engine`` are fields of their engines."""
    fields = {"block_size": 16, "tp_size": 2, "kv_head_count": 8, **of_engine}
    return [
        replace(node, models=frozenset(models), engines=tuple(replace(engine, **fields) for engine in node.engines))
        for node in ready(*node_ids)
    ]


def groups(**other: Any) -> list[Node]:
    """Returns two nodes of each role, the second ones of another build."""
    return [*build("p1", "d1"), *build("p2", "d2", **other)]


def pairs_of(bench: Bench) -> set[tuple[str, str]]:
    """Returns which prefill and decode node served a turn together; turns ran one after the other."""
    return {
        (prefill.node, decode.node)
        for prefill, decode in zip(bench.engines.prefills, bench.engines.decodes, strict=True)
    }


async def explained(bench: Bench, *contents: str, **fields: Any) -> TurnExplanation:
    return await bench.turns.explain(chat_request(*contents, **fields))


def removed(explanation: TurnExplanation, leg: Leg) -> dict[str, list[str]]:
    """Returns which filter removed which nodes."""
    return {
        removal.filter: [target.node.node_id for target in removal.targets]
        for removal in explanation.legs[leg].removals
    }


# Builds of one model


@apart
async def test_of_many_turns_none_goes_to_both_of_two_groups(other: Mapping[str, Any]) -> None:
    bench = Bench(nodes=groups(**other), policy=Policy(explain=True))
    for number in range(TURNS):
        assert (await bench.chat(f"turn {number}")).served[0] == "cold"
    assert pairs_of(bench) == {("p1", "d1"), ("p2", "d2")}
    explanation = await explained(bench, "a")
    prefill = explanation.legs[Leg.PREFILL].picked
    assert prefill is not None
    stranger = {"p1": "d2", "p2": "d1"}[prefill.node.node_id]
    assert removed(explanation, Leg.DECODE) == {"compatible": [stranger]}


@apart
async def test_what_is_held_in_one_group_is_not_read_in_the_other(other: Mapping[str, Any]) -> None:
    """The holder may go on by itself; without that the turn is cold, in either group."""
    nodes = [*build("d1"), *build("p2", "d2", **other)]
    bench = Bench(nodes=nodes, policy=Policy(explain=True))
    bench.publish("a")
    explanation = await explained(bench, "a", "b", "c")
    assert explanation.planning is not None
    assert explanation.planning.miss == "incompatible"
    assert removed(explanation, Leg.READ) == {"compatible": ["p2"]}
    done = await bench.chat("a", "b", "c")
    assert done.served == ("cold", "incompatible")
    assert pairs_of(bench) == {("p2", "d2")}
    assert bench.owner.claims == []

    bench = Bench(nodes=nodes, prefer=Route.APPEND)
    bench.publish("a")
    assert (await bench.chat("a", "b", "c")).served == ("append", "")
    assert ([leg.node for leg in bench.engines.decodes], bench.engines.prefills) == (["d1"], [])


async def test_another_version_of_the_connector_takes_hand_offs_and_reads_nothing() -> None:
    bench = Bench(nodes=[*build("d1"), *build("p2", **VERSION)], policy=Policy(explain=True))
    bench.publish("a")
    explanation = await explained(bench, "a", "b", "c")
    assert explanation.planning is not None
    assert explanation.planning.miss == "no_connector"
    assert removed(explanation, Leg.READ) == {"compatible": ["p2"]}
    assert (await bench.chat("a", "b", "c")).served == ("cold", "no_connector")
    assert pairs_of(bench) == {("p2", "d1")}


async def test_during_a_rollout_every_conversation_is_read_by_its_own_version() -> None:
    bench = Bench(nodes=groups(**VERSION))
    for number in range(TURNS):
        holder = f"d{number % 2 + 1}"
        bench.publish(f"turn {number}", node_id=holder, set_id=f"set-{number}")
        done = await bench.chat(f"turn {number}", "b", "c")
        assert done.served == ("warm", "")
    assert pairs_of(bench) == {("p1", "d1"), ("p2", "d2")}


async def test_a_decode_server_that_repeats_heads_is_handed_off_to_and_not_read_from() -> None:
    """vLLM reads from more ranks than its own only where each head is there once."""
    bench = Bench(nodes=[*build("p1"), *build("d1", tp_size=16)])
    bench.publish("a")
    assert (await bench.chat("a", "b", "c")).served == ("cold", "incompatible")
    assert pairs_of(bench) == {("p1", "d1")}


async def test_a_turn_whose_only_prefill_node_is_of_another_build_is_computed_by_a_decode_node() -> None:
    bench = Bench(nodes=[*build("d1"), *build("p2", weights_digest="other")], policy=Policy(explain=True))
    explanation = await explained(bench, "a")
    assert removed(explanation, Leg.PREFILL) == {"compatible": ["p2"]}
    done = await bench.chat("a")
    assert done.answer.outcome.fallback
    assert ([leg.node for leg in bench.engines.decodes], bench.engines.prefills) == (["d1"], [])


# Models and adapters


async def test_turns_of_two_models_go_to_the_nodes_that_serve_them() -> None:
    bench = Bench(nodes=[*build("p1", "d1"), *build("p2", "d2", models=("n",))])
    served = {"m": ("p1", "d1"), "n": ("p2", "d2")}
    for number in range(TURNS):
        model = "mn"[number % 2]
        done: Done = await bench.chat(f"turn {number}", model=model)
        assert done.served[0] == "cold"
        legs = bench.engines.prefills[-1], bench.engines.decodes[-1]
        assert tuple(leg.node for leg in legs) == served[model]
        assert {leg.body["model"] for leg in legs} == {model}


async def test_an_adapter_is_asked_for_only_where_it_is_loaded() -> None:
    """All nodes serve the base model."""
    bench = Bench(nodes=[*build("p1", "d1"), *build("p2", "d2", models=("m", "poet"))])
    for number in range(TURNS):
        assert (await bench.chat(f"turn {number}", model="poet")).served[0] == "cold"
    assert pairs_of(bench) == {("p2", "d2")}
    await bench.chat("a")
    assert bench.engines.prefills[-1].node == "p1", "the base model is asked for where there is less to do"


async def test_what_an_adapters_holder_holds_is_not_read_where_the_adapter_is_not_loaded() -> None:
    bench = Bench(nodes=[*build("p1", "d1"), *build("d2", models=("m", "poet"))])
    bench.publish("a", node_id="d2")
    key = keys_of(chat("a", model="poet"), None).own
    bench.registry.pointers = [replace(pointer, key=key) for pointer in bench.registry.pointers]
    done = await bench.chat("a", "b", "c", model="poet")
    assert done.served == ("cold", "incompatible")
    assert bench.owner.claims == []
    assert ([leg.node for leg in bench.engines.decodes], bench.engines.prefills) == (["d2"], [])


def test_engines_of_these_groups_differ_only_in_what_is_named() -> None:
    """Else a test could pass for another reason than its own."""
    (first, *_), (other, *_) = build("p1"), build("p1", **BUILDS["weights"])
    assert isinstance(first.engines[0], Engine)
    assert replace(other.engines[0], weights_digest=first.engines[0].weights_digest) == first.engines[0]
