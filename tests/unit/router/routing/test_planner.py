"""Which ways a turn can go, and which of them it goes."""

import random
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from backhaul_router.core import misses
from backhaul_router.core.engines import Failure
from backhaul_router.core.nodes import NodeState, NodeTable
from backhaul_router.core.routing.assembly import assemble
from backhaul_router.core.routing.demand import Demand, Held, Leg
from backhaul_router.core.routing.estimates import Estimate, Estimator
from backhaul_router.core.routing.planner import FRESH_HANDLE_S, Plan, Planner, Planning, RoutePolicy
from backhaul_router.core.routing.reports import EngineReport
from backhaul_router.core.routing.settings import RoutingSettings, parse_routing, profiles
from backhaul_router.core.routing.target import Target
from backhaul_router.core.turn import Route
from tests.fakes.clock import FakeClock
from tests.unit.router.routing.targets import ids, target

P1, P2, D1, D2 = (target(node_id) for node_id in ("p1", "p2", "d1", "d2"))
ALL = (P1, P2, D1, D2)
ONLY_BUSY = (
    '[prefill]\nfilters = ["max-waiting"]\nmax_waiting = 5\n[decode]\nfilters = ["max-waiting"]\nmax_waiting = 5'
)
BUSY = EngineReport(running=1, waiting=6, kv_usage=0.5)


class Estimates(Estimator):
    """Each kind of way takes as long as it is told, seconds."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = {"cold": 1.0, "warm": 1.0, "append": 1.0, "alone": 1.0, **seconds}

    def had(self, demand: Demand, target: Target) -> int:
        return 0

    def cold(self, demand: Demand, prefill: Target, decode: Target) -> Estimate:
        return Estimate(self.seconds["cold"])

    def warm(self, demand: Demand, prefill: Target) -> Estimate:
        return Estimate(prefill_s=self.seconds["warm"])

    def append(self, demand: Demand) -> Estimate:
        return Estimate(move_s=self.seconds["append"])

    def alone(self, demand: Demand, decode: Target) -> Estimate:
        return Estimate(penalty_s=self.seconds["alone"])


class Plans:
    """A planner, and all that it goes by."""

    def __init__(
        self,
        targets: Iterable[Target] = ALL,
        *,
        settings: str = "",
        policy: RoutePolicy | None = None,
        **seconds: float,
    ) -> None:
        self.table = NodeTable()
        self.table.replace(target.node for target in targets)
        parsed: RoutingSettings = parse_routing(settings)
        self.routing = assemble(
            table=self.table,
            monotonic=FakeClock().monotonic,
            rng=random.Random(3),
            settings=parsed,
            policy=policy or RoutePolicy(),
        )
        self.live = self.routing.live
        self.ill: set[str] = set()
        self.planner = Planner(
            table=self.table,
            profiles=profiles(parsed, self.live),
            estimator=Estimates(**seconds),
            well=lambda node: node.node_id not in self.ill,
            limits=parsed.limits,
            policy=policy or RoutePolicy(),
        )

    def plan(self, **fields: Any) -> Planning:
        return self.planner.plan(turn(**fields))

    def busy(self, *targets: Target) -> None:
        for each in targets:
            self.live.reports.take(each.key, BUSY)


def turn(*, holder: Target | None = D1, proved: bool = True, held: int = 9_000, **fields: Any) -> Demand:
    """A turn of 10,000 tokens; ``holder`` holds most of them."""
    return Demand(
        **{"model": "m", "token_count": 10_000, "held": Held(holder, held, proved) if holder else None, **fields}
    )


def chosen(planning: Planning) -> str:
    """The route, and over which nodes."""
    plan = planning.chosen
    if plan is None:
        return "none"
    return " ".join([plan.route.value, *ids(target for target in (plan.prefill, plan.decode) if target)])


def reason(planning: Planning, route: Route) -> str:
    """Why a route cannot be gone; empty when it can."""
    [way] = [way for way in planning.ways if way.route is route]
    return "" if isinstance(way, Plan) else way.reason


# The least estimate


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"append": 0.5}, "append d1"),
        ({"warm": 0.5}, "warm p1 d1"),
        ({"cold": 0.5}, "cold p1 d1"),
        ({"append": 1.01, "warm": 1.01, "cold": 1.0}, "append d1"),
        ({"append": 1.03, "warm": 1.01, "cold": 1.0}, "warm p1 d1"),
        ({"append": 1.03, "warm": 1.03, "cold": 1.0}, "cold p1 d1"),
    ],
)
def test_the_least_estimate_wins_and_what_is_as_good_goes_to_the_holder(seconds: dict[str, Any], best: str) -> None:
    assert chosen(Plans(**seconds).plan()) == best


def test_only_decode_engines_that_the_gateway_names_answer_whoever_prefills() -> None:
    plans = Plans()
    assert chosen(plans.plan(holder=None, endpoints=frozenset({D2.node.endpoint}))) == "cold p1 d2"
    assert chosen(plans.plan(endpoints=frozenset({D1.node.endpoint}))) == "append d1"
    elsewhere = plans.plan(endpoints=frozenset({D2.node.endpoint}))
    assert chosen(elsewhere) == "cold p1 d2"
    assert (reason(elsewhere, Route.APPEND), reason(elsewhere, Route.WARM)) == (misses.HOLDER_AVOIDED,) * 2
    nowhere = plans.plan(endpoints=frozenset())
    assert (chosen(nowhere), reason(nowhere, Route.COLD)) == ("none", misses.NO_DECODE)


def test_a_short_prompt_may_go_to_one_engine_alone() -> None:
    plans = Plans(alone=0.5)
    assert chosen(plans.plan(holder=None, token_count=256)) == "cold d1"
    assert chosen(plans.plan(holder=None, token_count=257)) == "cold p1 d1"
    assert chosen(Plans(alone=1.5).plan(holder=None, token_count=256)) == "cold p1 d1"


# Routes that may be taken


@pytest.mark.parametrize(
    ("routes", "best"),
    [
        ({Route.COLD}, "cold p1 d1"),
        ({Route.COLD, Route.WARM}, "warm p1 d1"),
        ({Route.COLD, Route.APPEND}, "append d1"),
        (set(Route), "append d1"),
    ],
    ids=str,
)
def test_only_routes_that_are_on_are_taken(routes: Collection[Route], best: str) -> None:
    plans = Plans(policy=RoutePolicy(routes=frozenset(routes)), append=0.1, warm=0.2)
    assert chosen(plans.plan()) == best


@pytest.mark.parametrize(
    ("prefer", "best"),
    [(Route.COLD, "cold p1 d1"), (Route.WARM, "warm p1 d1"), (Route.APPEND, "append d1")],
    ids=str,
)
def test_a_preferred_route_is_taken_whatever_is_estimated(prefer: Route, best: str) -> None:
    seconds: dict[str, Any] = {**dict.fromkeys(("cold", "warm", "append"), 0.1), prefer.value: 9.0}
    plans = Plans(policy=RoutePolicy(prefer=prefer), **seconds)
    assert chosen(plans.plan()) == best


@pytest.mark.parametrize("prefer", [Route.WARM, Route.APPEND], ids=str)
def test_where_the_preferred_route_cannot_be_taken_the_turn_is_cold(prefer: Route) -> None:
    plans = Plans(policy=RoutePolicy(prefer=prefer), alone=0.1)
    assert chosen(plans.plan(holder=None)) == "cold p1 d1"
    assert chosen(plans.plan(holder=None, token_count=100)) == "cold p1 d1"


def test_the_reason_is_that_of_the_route_that_may_be_taken() -> None:
    unproved = turn(proved=False)
    assert Plans(policy=RoutePolicy(prefer=Route.APPEND)).planner.plan(unproved).miss == misses.UNPROVED
    assert Plans(policy=RoutePolicy(routes=frozenset({Route.COLD}))).planner.plan(unproved).miss == misses.ROUTE_OFF
    assert Plans(cold=0.1).planner.plan(unproved).miss == misses.NOT_WORTH


# What the holder may compute itself


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"holder": None}, misses.NOT_FOUND),
        ({"proved": False}, misses.UNPROVED),
        ({"held": 1_808}, ""),
        ({"held": 1_807}, misses.TOO_LONG),
        ({"tried": frozenset({"d1"})}, misses.HOLDER_AVOIDED),
        ({"model": "adapter"}, misses.HOLDER_AVOIDED),
    ],
)
def test_the_holder_goes_on_alone_where_it_may(fields: dict[str, Any], why: str) -> None:
    assert reason(Plans().plan(**fields), Route.APPEND) == why


@pytest.mark.parametrize("route", [Route.APPEND, Route.WARM], ids=str)
def test_a_holder_that_is_ill_is_left_alone_only_while_another_one_is_well(route: Route) -> None:
    plans = Plans()
    plans.ill = {"d1"}
    assert reason(plans.plan(), route) == misses.HOLDER_AVOIDED
    plans.ill = {"d1", "d2"}
    assert reason(plans.plan(), route) == ""


@pytest.mark.parametrize("route", [Route.APPEND, Route.WARM], ids=str)
def test_filters_that_leave_nothing_of_the_holder_count_for_it_too(route: Route) -> None:
    plans = Plans(settings=ONLY_BUSY)
    assert reason(plans.plan(), route) == ""
    plans.busy(D1)
    assert reason(plans.plan(), route) == misses.HOLDER_AVOIDED


# Who reads


@pytest.mark.parametrize(
    ("reader", "why"),
    [
        (P1, ""),
        (target("p1", compatibility_hash="x"), misses.INCOMPATIBLE),
        (target("p1", weights_digest="x"), misses.INCOMPATIBLE),
        (target("p1", connector_version=""), misses.NO_CONNECTOR),
        (target("p1", connector_version="2"), misses.NO_CONNECTOR),
        (target("p1", reuse=False), misses.NO_CONNECTOR),
        (target("p1", state=NodeState.NOT_READY), misses.INCOMPATIBLE),
    ],
)
def test_who_cannot_read_is_told_with_the_reason(reader: Target, why: str) -> None:
    plans = Plans([reader, D1])
    assert reason(plans.plan(), Route.WARM) == why


def test_a_reader_that_failed_to_read_from_the_holder_reads_elsewhere() -> None:
    plans = Plans([P1, D1, D2], warm=0.5)
    plans.live.pairs.read_failed(P1.node, D1.node)
    assert reason(plans.plan(), Route.WARM) == misses.PAIR_APART
    assert chosen(plans.plan(holder=D2)) == "warm p1 d2"


# Without prefill, or without decode


def test_where_there_is_no_prefill_engine_decode_computes_unless_it_must_not() -> None:
    plan = Plans([D1]).plan(holder=None).chosen
    assert plan is not None
    assert (plan.prefill, plan.decode, plan.fallback) == (None, D1, True)
    strict = Plans([D1], policy=RoutePolicy(decode_computes=False)).plan(holder=None)
    assert (chosen(strict), reason(strict, Route.COLD)) == ("none", misses.NO_PREFILL)


def test_where_decode_must_not_compute_neither_does_it_short_prompts_but_the_holder_goes_on() -> None:
    plans = Plans(policy=RoutePolicy(decode_computes=False), alone=0.1, append=0.2)
    assert chosen(plans.plan(holder=None, token_count=100)) == "cold p1 d1"
    assert chosen(plans.plan()) == "append d1"


@pytest.mark.parametrize("decode_computes", [True, False])
def test_without_a_decode_engine_there_is_no_way(decode_computes: bool) -> None:
    planning = Plans([P1], policy=RoutePolicy(decode_computes=decode_computes)).plan(holder=None)
    assert (chosen(planning), reason(planning, Route.COLD)) == ("none", misses.NO_DECODE)


def test_a_way_over_two_engines_that_may_be_gone_is_no_fallback() -> None:
    plan = Plans(alone=0.5).plan(holder=None, token_count=100).chosen
    assert plan is not None
    assert not plan.fallback


def test_what_failed_this_turn_is_used_when_there_is_no_other() -> None:
    assert chosen(Plans().plan(holder=None, tried=frozenset({"p1", "d1"}))) == "cold p2 d2"
    assert chosen(Plans([P1, D1]).plan(holder=None, tried=frozenset({"p1", "d1"}))) == "cold p1 d1"


# Busy


@pytest.mark.parametrize(
    ("busy", "targets", "strict", "is_busy"),
    [
        ([P1, P2, D1, D2], ALL, False, True),
        ([D1, D2], ALL, False, True),
        ([P1, P2], ALL, True, True),
        ([D1, D2], ALL, True, True),
        ([D1], [D1], False, True),
        ([P1], [P1], False, False),
        ([], [P1], False, False),
        ([], [], False, False),
        ([], [], True, False),
    ],
)
def test_a_turn_without_a_way_is_told_whether_all_are_busy_or_none_is_there(
    busy: list[Target], targets: Iterable[Target], strict: bool, is_busy: bool
) -> None:
    plans = Plans(targets, settings=ONLY_BUSY, policy=RoutePolicy(decode_computes=not strict))
    plans.busy(*busy)
    assert chosen(plans.plan(holder=None)) == "none"
    assert plans.planner.busy(turn(holder=None), alone=False) is is_busy


def test_a_turn_that_needs_one_engine_alone_is_told_so_too() -> None:
    plans = Plans(settings=ONLY_BUSY)
    plans.busy(D1, D2)
    assert plans.planner.alone(turn(holder=None)) is None
    assert plans.planner.busy(turn(holder=None), alone=True)


def test_where_prefill_is_busy_decode_computes() -> None:
    plans = Plans(settings=ONLY_BUSY)
    plans.busy(P1, P2)
    assert chosen(plans.plan(holder=None)) == "cold d1"


# By a fresh handle


@pytest.mark.parametrize(("more_s", "pays"), [(-0.001, True), (0.001, False)])
def test_a_fresh_handle_must_pay_for_its_making(more_s: float, pays: bool) -> None:
    planner = Plans(warm=1.0 - FRESH_HANDLE_S + more_s, cold=1.0).planner
    assert (planner.reading(turn(), tokens_certain=False) is not None) is pays


def test_where_reading_is_preferred_a_fresh_handle_need_not_pay() -> None:
    planner = Plans(policy=RoutePolicy(prefer=Route.WARM), warm=9.0).planner
    assert planner.reading(turn(), tokens_certain=False) is not None


def test_engines_without_the_connector_read_only_what_is_certain_and_only_of_known_weights() -> None:
    stock = target("p1", connector_version="", reuse=False)
    planner = Plans([stock, D1], warm=0.1).planner
    assert planner.reading(turn(), tokens_certain=False) is None
    way = planner.reading(turn(), tokens_certain=True)
    assert way is not None
    assert way.reader == stock
    unknown = target("p1", connector_version="", reuse=False, weights_digest="")
    assert Plans([unknown, D1], warm=0.1).planner.reading(turn(), tokens_certain=True) is None


@pytest.mark.parametrize("policy", [RoutePolicy(prefer=Route.COLD), RoutePolicy(routes=frozenset({Route.COLD}))])
def test_where_nothing_may_be_read_no_fresh_handle_is_asked_for(policy: RoutePolicy) -> None:
    assert Plans(policy=policy, warm=0.1).planner.reading(turn(), tokens_certain=True) is None


# What it rests on


def test_a_plan_follows_the_nodes() -> None:
    plans = Plans([P1, D1])
    assert chosen(plans.plan(holder=None)) == "cold p1 d1"
    plans.table.change([P2.node, D2.node], ["p1", "d1"])
    assert chosen(plans.plan(holder=None)) == "cold p2 d2"
    plans.table.drop_orphan("p1")
    plans.table.change([], ["p2"])
    assert chosen(plans.plan(holder=None)) == "cold p2 d2"
    plans.table.drop_orphan("p2")
    assert chosen(plans.plan(holder=None)) == "cold d2"


def test_planning_is_nobodys_turn() -> None:
    plans = Plans()
    assert {chosen(plans.plan(holder=None)) for _ in range(3)} == {"cold p1 d1"}
    plans.live.breakers.failed(P1.node, Failure.REFUSED)
    assert {chosen(plans.plan(holder=None)) for _ in range(3)} == {"cold p2 d1"}


def test_the_legs_are_explained_to_who_asks() -> None:
    explanations: dict[Leg, Any] = {}
    Plans().planner.plan(turn(), explanations)
    assert {leg: ids([each.picked]) for leg, each in explanations.items()} == {
        Leg.READ: ["p1"],
        Leg.PREFILL: ["p1"],
        Leg.DECODE: ["d1"],
    }


def test_nodes_that_cannot_serve_at_all_are_explained_too() -> None:
    draining = target("d3", state=NodeState.DRAINING)
    other = target("p3", models=frozenset({"another"}))
    explanations: dict[Leg, Any] = {}
    Plans([*ALL, draining, other]).planner.plan(turn(), explanations)
    told = {leg: {gone.filter: ids(gone.targets) for gone in each.removals} for leg, each in explanations.items()}
    assert told == {Leg.READ: {"model": ["p3"]}, Leg.PREFILL: {"model": ["p3"]}, Leg.DECODE: {"ready": ["d3"]}}
