"""Chooses the way of a turn: finds what it can reuse, plans, and claims what the plan needs.

Whatever goes wrong is a reason for which the turn is cold.
"""

from collections.abc import Sequence
from dataclasses import replace

from backhaul_router.core import misses
from backhaul_router.core.lookup import Beginning
from backhaul_router.core.routing.demand import Demand, Held, Prefix
from backhaul_router.core.routing.planner import Plan, Planner
from backhaul_router.core.routing.tokens import TokenRates
from backhaul_router.core.turn import Route
from backhaul_router.lookups import Found, Lookups
from backhaul_router.running_turn import Turn
from backhaul_router.second_chances import SecondChances
from backhaul_router.warm import Warm


class Chooser:
    """Chooses for one turn after the other."""

    def __init__(
        self, *, lookups: Lookups, second_chances: SecondChances, planner: Planner, rates: TokenRates
    ) -> None:
        self._lookups = lookups
        self._second_chances = second_chances
        self._planner = planner
        self._rates = rates

    async def choose(self, turn: Turn, *, reuse: bool) -> None:
        """Sets the turn's demand and plan, and what it may read. Without a plan there is no way at all."""
        found = await self._found(turn, reuse)
        turn.demand = self._demand(turn, found)
        if turn.alone:
            turn.outcome.cold(found.miss)
            turn.plan = self._planner.alone(turn.demand)
            return
        planning = self._planner.plan(turn.demand)
        plan, miss = planning.chosen, found.miss
        if plan is not None and plan.route is Route.APPEND:
            turn.take(plan)
            turn.outcome.append()
            return
        if plan is not None and plan.route is Route.WARM and plan.prefill is not None:
            grant = await self._lookups.claim(found, plan.prefill, scope=turn.scope, trace=turn.trace)
            if not isinstance(grant, str):
                turn.take(plan, Warm(grant, plan.prefill, plan.decode))
                return
            miss, plan = grant, None
        elif found.pointer is not None:
            miss = planning.reason(Route.WARM)
        turn.outcome.cold(miss)
        if miss not in misses.SECOND_CHANCE or not await self._second_chance(turn, found):
            turn.take(plan or self._planner.cold(replace(turn.demand, held=None)).chosen)

    async def _found(self, turn: Turn, reuse: bool) -> Found:
        miss = _no_lookup(turn, reuse)
        if miss:
            return Found(miss)
        return await self._lookups.find(
            turn.body, scope=turn.scope, keys=turn.keys, headers=turn.engine_headers, trace=turn.trace
        )

    async def _second_chance(self, turn: Turn, found: Found) -> bool:
        """Asks for what is merely cached; tells whether the turn is warm by it."""
        if not found.cached:
            return False
        chance = await self._second_chances.harvest_for(
            turn.body,
            found.cached,
            demand=turn.demand,
            scope=turn.scope,
            cache_salt=turn.cache_salt,
            headers=turn.engine_headers,
            trace=turn.trace,
        )
        ...


def _no_lookup(turn: Turn, reuse: bool) -> str:
    if turn.alone:
        return misses.UNSUPPORTED_REQUEST
    if not reuse:
        return misses.REUSE_OFF
    if not turn.keys.label:
        return misses.NO_KEYS
    return "" if turn.keys.find else misses.FIRST_TURN
