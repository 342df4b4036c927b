"""Why a turn goes the way it goes, for people: as the gRPC answer, and short enough for a response header.

Explanations name nodes, and neither addresses nor anything of the turn's content.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from backhaul.router.v1 import router_pb2
from backhaul_common.durations import duration
from backhaul_router.core.routing.demand import Demand
from backhaul_router.core.routing.estimates import Estimate
from backhaul_router.core.routing.explanation import ProfileExplanation, Rating
from backhaul_router.core.routing.planner import Explanations, NoWay, Plan, Planning
from backhaul_router.core.routing.target import Target

HEADER = "x-backhaul-explain"

MAX_HEADER_BYTES = 6 * 1024
"""Longest header: proxies and clients take 8 KiB of headers as a rule."""

_MAX_NAMED = 8
"""Engines of each kind that a header names."""


@dataclass(slots=True)
class TurnExplanation:
    """What was considered for a turn, filled in as it is chosen."""

    demand: Demand | None = None
    planning: Planning | None = None
    miss: str = ""
    """Why the turn is cold; empty when it is not, or cannot be told yet."""
    legs: Explanations = field(default_factory=dict)

    @property
    def route(self) -> str:
        """The chosen route; empty when there is none."""
        return self.planning.chosen.route.value if self.planning and self.planning.chosen else ""


def explanation_to(explanation: TurnExplanation) -> router_pb2.ExplainResponse:
    """Returns the gRPC answer."""
    demand, planning = explanation.demand, explanation.planning
    held = demand.held if demand else None
    return router_pb2.ExplainResponse(
        route=explanation.route,
        miss_reason=explanation.miss,
        prompt_token_count=demand.token_count if demand else 0,
        held_token_count=demand.held_tokens if demand else 0,
        holder_node_id=held.holder.node.node_id if held else "",
        ways=[_way_to(way, planning) for way in planning.ways] if planning else [],
        legs=[_leg_to(leg.value, choice) for leg, choice in explanation.legs.items()],
    )


def explanation_in_header(explanation: TurnExplanation) -> str:
    """Returns one JSON object in ASCII: the ways, and who was removed by which filter; less when it would be long."""
    demand, planning = explanation.demand, explanation.planning
    document: dict[str, Any] = {
        "route": explanation.route,
        "miss": explanation.miss,
        "prompt_tokens": demand.token_count if demand else 0,
        "held_tokens": demand.held_tokens if demand else 0,
        "ways": [_way_in(way, planning) for way in planning.ways] if planning else [],
    }
    removals = {leg.value: _removals_in(choice) for leg, choice in explanation.legs.items() if choice.removals}
    text = _ascii({**document, "removed": removals})
    return text if len(text) <= MAX_HEADER_BYTES else _ascii(document)


# gRPC


def _way_to(way: Plan | NoWay, planning: Planning) -> router_pb2.Way:
    if isinstance(way, NoWay):
        return router_pb2.Way(route=way.route.value, reason=way.reason)
    return router_pb2.Way(
        route=way.route.value,
        prefill_node_id=way.prefill.node.node_id if way.prefill else "",
        decode_node_id=way.decode.node.node_id,
        estimate=_estimate_to(way.estimate),
        chosen=way is planning.chosen,
    )


def _estimate_to(estimate: Estimate) -> router_pb2.RouteEstimate:
    return router_pb2.RouteEstimate(
        wait=duration(estimate.wait_s),
        prefill=duration(estimate.prefill_s),
        move=duration(estimate.move_s),
        penalty=duration(estimate.penalty_s),
        total=duration(estimate.total_s),
    )


def _leg_to(leg: str, choice: ProfileExplanation) -> router_pb2.LegChoice:
    return router_pb2.LegChoice(
        leg=leg,
        removals=[
            router_pb2.LegChoice.Removal(filter=removal.filter, engines=_names(removal.targets))
            for removal in choice.removals
        ],
        ratings=[_rating_to(rating) for rating in choice.ratings],
        picked=_name(choice.picked) if choice.picked else "",
    )


def _rating_to(rating: Rating) -> router_pb2.LegChoice.Rating:
    return router_pb2.LegChoice.Rating(engine=_name(rating.target), total=rating.total, scores=dict(rating.scores))


# Header


def _ascii(document: dict[str, Any]) -> str:
    # Headers hold nothing else, and ids of nodes may be anything.
    return json.dumps(document, separators=(",", ":"))


def _way_in(way: Plan | NoWay, planning: Planning) -> dict[str, Any]:
    if isinstance(way, NoWay):
        return {"route": way.route.value, "reason": way.reason}
    estimate = way.estimate
    parts = {
        "wait": estimate.wait_s,
        "prefill": estimate.prefill_s,
        "move": estimate.move_s,
        "penalty": estimate.penalty_s,
        "total": estimate.total_s,
    }
    return {
        "route": way.route.value,
        "prefill": _name(way.prefill) if way.prefill else "",
        "decode": _name(way.decode),
        "ms": {name: round(seconds * 1000, 1) for name, seconds in parts.items()},
        "chosen": way is planning.chosen,
    }


def _removals_in(choice: ProfileExplanation) -> dict[str, list[str]]:
    return {removal.filter: _names(removal.targets[:_MAX_NAMED]) for removal in choice.removals}


def _names(targets: Iterable[Target]) -> list[str]:
    return [_name(target) for target in targets]


def _name(target: Target) -> str:
    several = target.engine is not None and len(target.node.engines) > 1
    return f"{target.node.node_id}#{target.engine.rank}" if several and target.engine else target.node.node_id
