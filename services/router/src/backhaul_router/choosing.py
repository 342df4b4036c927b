"""Chooses the way of a turn: finds what it can reuse, plans, and claims what the plan needs.

Whatever goes wrong is a reason for which the turn is cold.
"""

from dataclasses import replace

from backhaul_router.core import misses
from backhaul_router.core.body import Endpoint
from backhaul_router.core.routing.demand import Demand, Held, Prefix
from backhaul_router.core.routing.planner import Plan, Planner, Planning
from backhaul_router.core.routing.target import Target
from backhaul_router.core.routing.tokens import TokenRates
from backhaul_router.core.turn import Route
from backhaul_router.explaining import TurnExplanation
from backhaul_router.lookups import Found, Lookups
from backhaul_router.running_turn import Turn
from backhaul_router.second_chances import SecondChances
from backhaul_router.warm import Warm


class Chooser:
    """Chooses for one turn after the other."""

    def __init__(self, *, lookups: Lookups, second_chances: SecondChances, planner: Planner, rates: TokenRates) -> None:
        self._lookups = lookups
        self._second_chances = second_chances
        self._planner = planner
        self._rates = rates

    async def choose(self, turn: Turn, *, reuse: bool) -> None:
        """Sets the turn's demand, its plan, and what it may read; without a plan there is no way at all."""
        found = await self._found(turn, reuse=reuse)
        turn.demand = self._demand(turn, found)
        planning = self._planning(turn)
        plan = planning.chosen
        if plan is not None and plan.route is Route.APPEND:
            turn.append(plan, found.pointer)
        elif plan is not None and plan.route is Route.WARM:
            await self._claim(turn, found, plan)
        else:
            await self._do_without(turn, found, found.miss or planning.miss, plan)
        if turn.explanation is not None:
            turn.explanation.miss = turn.outcome.miss

    async def explain(self, turn: Turn, *, reuse: bool) -> TurnExplanation:
        """Returns what would be chosen for a turn, and claims nothing."""
        turn.explanation = TurnExplanation()
        found = await self._found(turn, reuse=reuse)
        turn.demand = self._demand(turn, found)
        planning = self._planning(turn)
        if planning.chosen is None or planning.chosen.route is Route.COLD:
            turn.explanation.miss = found.miss or planning.miss
        return turn.explanation

    async def _found(self, turn: Turn, *, reuse: bool) -> Found:
        """Returns what a turn can reuse."""
        miss = _no_lookup(turn, reuse)
        if miss:
            turn.outcome.reuse = miss not in misses.WITHOUT_REUSE
            return Found(miss)
        return await self._lookups.find(
            turn.body, scope=turn.scope, keys=turn.keys, headers=turn.engine_headers, trace=turn.trace
        )

    def _demand(self, turn: Turn, found: Found) -> Demand:
        """Returns what a turn asks for."""
        keys, model = turn.keys, turn.body.model
        token_count = turn.given_tokens or self._rates.estimate(model, turn.byte_count)
        held = None
        if found.pointer is not None and found.holder is not None:
            held = Held(found.holder, found.pointer.token_count, found.proved and _reachable(turn, found.holder))
            if turn.body.endpoint is not Endpoint.COMPLETIONS:
                # What is held has been counted, so that only the length of the rest is estimated.
                token_count = held.token_count + self._rates.estimate(model, keys.new_byte_count(found.pointer.key))
        per_byte = token_count / max(1, turn.byte_count)
        prefixes = [
            Prefix(f"{turn.scope}:{beginning.digest}", round(beginning.byte_count * per_byte))
            for beginning in keys.beginnings
            if beginning.digest
        ]
        return replace(turn.demand, token_count=token_count, prefixes=tuple(prefixes), held=held)

    def _planning(self, turn: Turn) -> Planning:
        """Returns the ways of a turn."""
        explanation = turn.explanation
        legs = None if explanation is None else explanation.legs
        if turn.keys.previous:
            planning = self._planner.at_keeper(turn.demand, legs)
        elif turn.alone:
            alone = self._planner.alone(turn.demand, legs)
            planning = Planning(alone, (alone,) if alone else ())
        else:
            planning = self._planner.plan(turn.demand, legs)
        if explanation is not None:
            explanation.demand, explanation.planning = turn.demand, planning
        return planning

    async def _claim(self, turn: Turn, found: Found, plan: Plan) -> None:
        grant = await self._lookups.claim(found, plan.reader, scope=turn.scope, trace=turn.trace)
        if isinstance(grant, str):
            await self._do_without(turn, found, grant, None)
        else:
            origin = found.pointer.traceparent if found.pointer else ""
            turn.read(plan, Warm(grant, plan.reader, plan.decode, origin=origin))

    async def _do_without(self, turn: Turn, found: Found, miss: str, plan: Plan | None) -> None:
        """Nothing is claimed: what is merely cached may do, or the turn is cold."""
        turn.outcome.cold(miss)
        if found.cached and miss in misses.SECOND_CHANCE and not turn.alone:
            chance = await self._second_chances.harvest_for(
                turn.body,
                found.cached,
                demand=turn.demand,
                scope=turn.scope,
                cache_salt=turn.cache_salt,
                headers=turn.engine_headers,
                trace=turn.trace,
            )
            if not isinstance(chance, str):
                turn.read(chance.plan, chance.warm)
                return
            turn.outcome.cold(chance or miss)
        if plan is None and not turn.alone:
            turn.demand = replace(turn.demand, held=None)
            plan = self._planner.cold(turn.demand).chosen
        turn.plan = plan


def _no_lookup(turn: Turn, reuse: bool) -> str:
    if turn.alone and not turn.body.previous_response_id:
        return misses.UNSUPPORTED_REQUEST
    if not reuse:
        return misses.REUSE_OFF
    if turn.alone and not turn.keys.previous:
        return misses.UNSUPPORTED_REQUEST
    if not turn.retains:
        return misses.NO_KEYS
    return "" if turn.keys.find else misses.FIRST_TURN


def _reachable(turn: Turn, holder: Target) -> bool:
    """Tells whether a turn can be sent to this very engine.

    vLLM's `/v1/responses` takes no rank: on a server with several engines, any of them gets it
    (`entrypoints/openai/responses/serving.py`, ``_generate_with_builtin_tools``).
    """
    return turn.body.endpoint is not Endpoint.RESPONSES or len(holder.node.engines) == 1
