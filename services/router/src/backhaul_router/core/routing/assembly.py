"""Puts routing together."""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from backhaul_router.core.health.breakers import Breakers, BreakerState, OnEject
from backhaul_router.core.health.pairs import Pairs
from backhaul_router.core.health.retries import RetryBudget
from backhaul_router.core.load import Load
from backhaul_router.core.nodes import Node, NodeTable
from backhaul_router.core.routing.costs import Costs
from backhaul_router.core.routing.estimates import Estimator
from backhaul_router.core.routing.learning import Learning
from backhaul_router.core.routing.live import Live
from backhaul_router.core.routing.planner import Planner, RoutePolicy
from backhaul_router.core.routing.prefixes import Prefixes
from backhaul_router.core.routing.recency import Recency
from backhaul_router.core.routing.reports import Reports
from backhaul_router.core.routing.settings import RoutingSettings, profiles
from backhaul_router.core.routing.shortlist import Shortlist
from backhaul_router.core.routing.tokens import TokenRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """All that chooses, and what it learns from."""

    live: Live
    planner: Planner
    learning: Learning
    rates: TokenRates
    retries: RetryBudget
    table: NodeTable

    def follow(self, node_ids: Collection[str]) -> None:
        """Takes note of which nodes there are: what is known of others is dropped."""
        live = self.live
        live.breakers.seen(node_ids)
        live.breakers.know(self.table)
        for part in (live.breakers, live.pairs, live.load, live.costs, live.prefixes, live.recency):
            part.forget(node_ids)


def assemble(
    *,
    table: NodeTable,
    monotonic: Callable[[], float],
    rng: random.Random,
    settings: RoutingSettings,
    policy: RoutePolicy,
    on_eject: OnEject = lambda _node, _failure: None,
) -> Routing:
    """Returns the routing of one router, which knows nothing yet."""
    load, costs, prefixes, reports = Load(monotonic), Costs(monotonic), Prefixes(), Reports(monotonic)
    breakers = Breakers(monotonic, rng, settings.breaker, on_eject=on_eject)
    estimator = Estimator(load, costs, prefixes, reports, disturbance=settings.limits.disturbance)
    recency = Recency()
    live = Live(
        load=load,
        costs=costs,
        prefixes=prefixes,
        reports=reports,
        breakers=breakers,
        pairs=Pairs(monotonic),
        recency=recency,
        estimator=estimator,
        shortlist=Shortlist(monotonic, prefixes, recency),
        rng=rng,
    )

    def well(node: Node) -> bool:
        return breakers.state(node) in (BreakerState.CLOSED, BreakerState.STARTING)

    rates = TokenRates()
    planner = Planner(
        table=table,
        profiles=profiles(settings, live),
        estimator=estimator,
        well=well,
        limits=settings.limits,
        policy=policy,
    )
    learning = Learning(costs=costs, prefixes=prefixes, rates=rates)
    return Routing(
        live=live, planner=planner, learning=learning, rates=rates, retries=RetryBudget(monotonic), table=table
    )
