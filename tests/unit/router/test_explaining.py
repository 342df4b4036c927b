"""How a turn's way is explained: over gRPC in full, and in a header in short."""

import json
from typing import Any

import pytest

from backhaul_router.core.routing.demand import Demand, Held, Leg, Prefix
from backhaul_router.core.routing.estimates import Estimate
from backhaul_router.core.routing.explanation import ProfileExplanation, Rating, Removal
from backhaul_router.core.routing.planner import NoWay, Plan, Planning
from backhaul_router.core.routing.target import Target
from backhaul_router.core.turn import Route
from backhaul_router.explaining import MAX_HEADER_BYTES, TurnExplanation, explanation_in_header, explanation_to
from tests.unit.router.routing.targets import target

P1, P2, D1 = target("p1"), target("p2"), target("d1")
APPEND = Plan(Route.APPEND, None, D1, Estimate(0.1, 0.2, 0.0, 0.05))
COLD = Plan(Route.COLD, P1, D1, Estimate(0.5, 1.0, 0.25, 0.0))
DEMAND = Demand("m", 1_000, (Prefix("tenant-scope:digest", 1_000),), Held(D1, 900, proved=True))


def explanation(*targets: Target) -> TurnExplanation:
    """Of a turn that is appended; ``targets`` were removed from what might have prefilled it."""
    prefill = ProfileExplanation(
        Leg.PREFILL,
        removals=[Removal("healthy", targets or (P2,))],
        ratings=(Rating(P1, (("time", 1.0), ("least-running", 0.5)), 0.9),),
        picked=P1,
    )
    ways = APPEND, NoWay(Route.WARM, "pair_apart"), COLD
    return TurnExplanation(DEMAND, Planning(APPEND, ways), "", {Leg.PREFILL: prefill})


def header(told: TurnExplanation) -> Any:
    return json.loads(explanation_in_header(told))


def test_the_answer_has_all_ways_and_what_they_consist_of() -> None:
    answer = explanation_to(explanation())
    assert (answer.route, answer.miss_reason, answer.holder_node_id) == ("append", "", "d1")
    assert (answer.prompt_token_count, answer.held_token_count) == (1_000, 900)
    assert [(way.route, way.reason, way.prefill_node_id, way.decode_node_id, way.chosen) for way in answer.ways] == [
        ("append", "", "", "d1", True),
        ("warm", "pair_apart", "", "", False),
        ("cold", "", "p1", "d1", False),
    ]
    estimate = answer.ways[2].estimate
    parts = estimate.wait, estimate.prefill, estimate.move, estimate.penalty, estimate.total
    assert [part.ToMilliseconds() for part in parts] == [500, 1_000, 250, 0, 1_750]
    assert not answer.ways[1].HasField("estimate")


def test_the_answer_says_how_the_engine_of_each_leg_was_chosen() -> None:
    [leg] = explanation_to(explanation()).legs
    assert (leg.leg, leg.picked) == ("prefill", "p1")
    assert [(removal.filter, [*removal.engines]) for removal in leg.removals] == [("healthy", ["p2"])]
    [rating] = leg.ratings
    assert (rating.engine, rating.total, dict(rating.scores)) == ("p1", 0.9, {"time": 1.0, "least-running": 0.5})


def test_a_turn_without_any_way_is_explained_too() -> None:
    told = TurnExplanation(Demand("m", 10), Planning(None, (NoWay(Route.COLD, "no_decode"),)), "first_turn")
    answer = explanation_to(told)
    assert (answer.route, answer.miss_reason, answer.holder_node_id) == ("", "first_turn", "")
    assert [way.reason for way in answer.ways] == ["no_decode"]
    assert (header(told)["route"], header(told)["ways"]) == ("", [{"route": "cold", "reason": "no_decode"}])


def test_the_header_has_the_ways_in_milliseconds_and_who_was_removed() -> None:
    told = header(explanation())
    assert (told["route"], told["miss"], told["prompt_tokens"], told["held_tokens"]) == ("append", "", 1_000, 900)
    assert told["ways"][0] == {
        "route": "append",
        "prefill": "",
        "decode": "d1",
        "ms": {"wait": 100.0, "prefill": 200.0, "move": 0.0, "penalty": 50.0, "total": 350.0},
        "chosen": True,
    }
    assert told["ways"][2]["chosen"] is False
    assert told["removed"] == {"prefill": {"healthy": ["p2"]}}


def test_of_many_engines_a_header_names_a_few() -> None:
    told = header(explanation(*(target(f"p{number}") for number in range(200))))
    assert told["removed"]["prefill"]["healthy"] == [f"p{number}" for number in range(8)]


def test_a_header_that_would_be_long_leaves_out_who_was_removed() -> None:
    text = explanation_in_header(explanation(*(target(f"p{number}" + "x" * 1_000) for number in range(8))))
    assert len(text) <= MAX_HEADER_BYTES
    assert "removed" not in json.loads(text)


@pytest.mark.parametrize("node_id", ["d\u00fc", "d\r\nx-evil: 1", 'd"', "\U0001f600"], ids=ascii)
def test_a_header_is_one_line_of_ascii_whatever_nodes_are_called(node_id: str) -> None:
    told = explanation()
    told.planning = Planning(None, (Plan(Route.COLD, None, target(node_id), Estimate()),))
    text = explanation_in_header(told)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text)["ways"][0]["decode"] == node_id


def test_an_engine_of_several_is_named_by_its_rank() -> None:
    first = target("d1")
    assert first.engine is not None
    several = target("d1", engines=(first.engine, target("d1", engine_id="e2", rank=1).node.engines[0]))
    told = TurnExplanation(
        DEMAND, Planning(None, (Plan(Route.COLD, None, Target(several.node, several.node.engines[1]), Estimate()),))
    )
    assert header(told)["ways"][0]["decode"] == "d1#1"


def test_neither_addresses_nor_digests_are_told() -> None:
    told = explanation()
    for text in (explanation_in_header(told), str(explanation_to(told))):
        for secret in ("http://", "127.0.0.1", "tenant-scope", "digest", "d1-engine"):
            assert secret not in text
