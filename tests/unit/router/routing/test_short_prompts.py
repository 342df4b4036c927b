"""Which prompts a decode engine may compute though prefill engines could: those of which it lacks little."""

import random
from collections.abc import Sequence

import pytest

from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.routing.assembly import Routing, assemble
from backhaul_router.core.routing.demand import Demand, Held, Prefix
from backhaul_router.core.routing.planner import RoutePolicy
from backhaul_router.core.routing.settings import LimitSettings, RoutingSettings
from backhaul_router.core.turn import Route
from tests.fakes.clock import FakeClock
from tests.unit.router.routing.targets import ids, target

P1, D1 = target("p1"), target("d1")
OPENING = 1_000
"""Tokens of the prompts' common beginning."""
LIMITS = LimitSettings(alone_tokens=256, append_tokens=8192)


@pytest.fixture
def routing() -> Routing:
    table = NodeTable()
    table.replace([P1.node, D1.node])
    settings, policy = RoutingSettings(limits=LIMITS), RoutePolicy(routes=frozenset({Route.COLD}))
    return assemble(
        table=table, monotonic=FakeClock().monotonic, rng=random.Random(3), settings=settings, policy=policy
    )


def asked(token_count: int, *, opening: int = OPENING, held: Held | None = None) -> Demand:
    prefixes = (Prefix(f"all {token_count}", token_count), Prefix("opening", opening))
    return Demand("m", token_count, prefixes, held)


def nodes(routing: Routing, demand: Demand) -> Sequence[str]:
    plan = routing.planner.plan(demand).chosen
    assert plan is not None
    return ids(filter(None, (plan.prefill, plan.decode)))


def test_what_a_decode_engine_has_cached_makes_a_prompt_short(routing: Routing) -> None:
    assert nodes(routing, asked(OPENING + 256)) == ["p1", "d1"]
    routing.live.prefixes.note(D1, asked(OPENING).prefixes)
    assert nodes(routing, asked(OPENING + 256)) == ["d1"]
    assert nodes(routing, asked(OPENING + 257)) == ["p1", "d1"]


def test_what_is_too_long_for_a_holder_is_not_given_to_one_that_may_have_lost_it(routing: Routing) -> None:
    for token_count, served_by in ((8_192, ["d1"]), (8_193, ["p1", "d1"])):
        demand = asked(token_count, opening=token_count - 100)
        routing.live.prefixes.note(D1, demand.prefixes[1:])
        assert nodes(routing, demand) == served_by


def test_what_is_held_goes_on_at_its_holder_by_no_other_way_than_the_holder_s_own(routing: Routing) -> None:
    routing.live.prefixes.note(D1, asked(OPENING).prefixes)
    assert nodes(routing, asked(OPENING + 100, held=Held(D1, OPENING, proved=True))) == ["p1", "d1"]
