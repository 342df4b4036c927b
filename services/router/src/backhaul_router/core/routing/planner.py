"""Which route a turn takes, and over which engines: the one that promises the first token soonest.

The engines of a route are those that the profiles of its legs name; the route is the one with the least estimate.
Estimates that are as good as equal go to whoever holds the conversation: what is held there is known for certain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from backhaul_router.core import misses
from backhaul_router.core.nodes import Node, NodeTable, Role, same_weights
from backhaul_router.core.routing.compatibility import keep_compatible, same_connector
from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.estimates import Estimate, Estimator
from backhaul_router.core.routing.explanation import ProfileExplanation
from backhaul_router.core.routing.filters.role import ROLES
from backhaul_router.core.routing.profile import Profile
from backhaul_router.core.routing.reach import Reach
from backhaul_router.core.routing.settings import LimitSettings
from backhaul_router.core.routing.target import Target, targets_of
from backhaul_router.core.turn import Route

TIE = 0.02
"""Part of an estimate by which another one must be less to be better."""

FRESH_HANDLE_S = 0.03
"""What a decode engine takes to make a handle for what it caches, seconds: it computes one token."""


Explanations = dict[Leg, ProfileExplanation]
"""How the engine of each leg was chosen; filled in for who asks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A way that can be gone."""

    route: Route
    prefill: Target | None
    """None: the decode engine computes what it does not have."""
    decode: Target
    estimate: Estimate
    fallback: bool = False
    """Whether there is no prefill engine for it."""

    @property
    def reader(self) -> Target:
        """The prefill engine of a warm way."""
        assert self.prefill is not None
        return self.prefill


@dataclass(frozen=True, slots=True)
class NoWay:
    """A way that cannot be gone."""

    route: Route
    reason: str
    """One of `misses`, or of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePolicy:
    """What an operator lets routes be."""

    routes: frozenset[Route] = frozenset(Route)
    """Routes that may be taken. Cold ones always may: they are what is left when nothing else works."""
    prefer: Route | None = None
    """Route that is taken wherever it can be, whatever the estimates say; None: by estimate."""
    decode_computes: bool = True
    """Whether decode engines may compute prompts of which they hold nothing."""


@dataclass(frozen=True, slots=True)
class Planning:
    """All ways of a turn, and the one that it takes."""

    chosen: Plan | None
    """None when there is none at all."""
    ways: tuple[Plan | NoWay, ...]

    @property
    def miss(self) -> str:
        """Returns why nothing that is held is read: why it cannot be, or that another way is better.

        Where nothing may be read it is why the holder does not go on by itself.
        """
        reasons = {way.route: way.reason for way in self.ways if isinstance(way, NoWay)}
        unread = reasons.get(Route.WARM, misses.NOT_WORTH)
        if all(way.route is not Route.WARM for way in self.ways):
            return reasons.get(Route.APPEND, misses.NOT_WORTH)
        return reasons.get(Route.APPEND, misses.NOT_WORTH) if unread == misses.ROUTE_OFF else unread


class Planner:
    """Plans turns over the nodes of one table."""

    def __init__(
        self,
        *,
        table: NodeTable,
        profiles: Mapping[Leg, Profile],
        estimator: Estimator,
        well: Callable[[Node], bool],
        limits: LimitSettings,
        policy: RoutePolicy,
    ) -> None:
        """``well`` tells whether a node has not failed of late."""
        self._table = table
        self._profiles = profiles
        self._estimator = estimator
        self._well = well
        self._limits = limits
        self._policy = policy
        self._reach = Reach(table)

    def plan(self, demand: Demand, explanations: Explanations | None = None) -> Planning:
        """Returns the ways of a turn, that over the holder alone first."""
        return self._decided(self._append(demand), self._warm(demand, explanations), *self._cold(demand, explanations))

    def cold(self, demand: Demand) -> Planning:
        """Returns the ways of a turn that reuses nothing that is held."""
        return self._decided(*self._cold(demand, None))

    def alone(self, demand: Demand, explanations: Explanations | None = None) -> Plan | None:
        """Returns a decode engine for a turn that needs one engine alone; None when there is none."""
        return self._decode_only(demand, explanations)

    def at_keeper(self, demand: Demand, explanations: Explanations | None = None) -> Planning:
        """Returns the ways of a turn whose conversation a decode engine alone knows, the only one that may answer."""
        alone = self._decode_only(demand, explanations)
        return self._decided(self._append(demand), alone or NoWay(Route.COLD, misses.NO_DECODE))

    def anyone(self, demand: Demand) -> Target | None:
        """Returns an engine for what is no turn, None when there is none.

        A prefill engine where one is: decode engines are giving answers.
        """
        return self._run(Leg.PREFILL, demand, None) or self._run(Leg.ALONE, demand, None)

    def busy(self, demand: Demand, *, alone: bool) -> bool:
        """Tells of a turn that has no way whether it will have one once engines have less to do."""
        explanations: Explanations = {}
        if alone:
            self._decode_only(demand, explanations)
        else:
            self._cold(demand, explanations)
        # The leg that was looked at last is the one without which there is no way.
        return bool(explanations) and [*explanations.values()][-1].busy

    def reader(self, demand: Demand, explanations: Explanations | None = None) -> Target | str:
        """Returns the prefill engine that should read what is held, or why there is none."""
        held = demand.held
        if held is None:
            return misses.NOT_FOUND
        if Route.WARM not in self._policy.routes or self._policy.prefer not in (None, Route.WARM):
            return misses.ROUTE_OFF
        if not self._reachable(held.holder, Leg.DECODE, demand):
            return misses.HOLDER_AVOIDED
        demand = demand.with_partners(held.holder)
        return self._run(Leg.READ, demand, explanations) or self._unread(held.holder, demand.model)

    def reading(self, demand: Demand, *, tokens_certain: bool) -> Plan | None:
        """Returns the way by a fresh handle for what is held, None where there is none or it does not pay.

        With ``tokens_certain`` a prefill engine without the connector will do: it is given the prompt as tokens.
        """
        found = self.reader(demand)
        if found == misses.NO_CONNECTOR and tokens_certain:
            found = self._token_reader(demand) or found
        if isinstance(found, str) or demand.held is None:
            return None
        way = Plan(Route.WARM, found, demand.held.holder, self._estimator.warm(demand, found))
        cold = self.cold(replace(demand, held=None)).chosen
        pays = cold is None or way.estimate.total_s + FRESH_HANDLE_S < cold.estimate.total_s
        return way if pays or self._policy.prefer is Route.WARM else None

    def _decided(self, *ways: Plan | NoWay) -> Planning:
        plans = [way for way in ways if isinstance(way, Plan)]
        preferred = [plan for plan in plans if plan.route is self._policy.prefer]
        return Planning(_least(preferred or plans), ways)

    # Ways

    def _append(self, demand: Demand) -> Plan | NoWay:
        reason = self._no_append(demand)
        if reason or demand.held is None:
            return NoWay(Route.APPEND, reason)
        return Plan(Route.APPEND, None, demand.held.holder, self._estimator.append(demand))

    def _no_append(self, demand: Demand) -> str:
        held = demand.held
        if held is None:
            return misses.NOT_FOUND
        if Route.APPEND not in self._policy.routes or self._policy.prefer not in (None, Route.APPEND):
            return misses.ROUTE_OFF
        if not held.proved:
            return misses.UNPROVED
        if demand.token_count - demand.held_tokens > self._limits.append_tokens:
            return misses.TOO_LONG
        return "" if self._reachable(held.holder, Leg.ALONE, demand) else misses.HOLDER_AVOIDED

    def _warm(self, demand: Demand, explanations: Explanations | None) -> Plan | NoWay:
        found = self.reader(demand, explanations)
        if isinstance(found, str) or demand.held is None:
            return NoWay(Route.WARM, str(found))
        return Plan(Route.WARM, found, demand.held.holder, self._estimator.warm(demand, found))

    def _cold(self, demand: Demand, explanations: Explanations | None) -> list[Plan | NoWay]:
        over_two = self._over_two(demand, explanations)
        if not self._policy.decode_computes or (over_two and not self._may_be_short(demand)):
            return [over_two or NoWay(Route.COLD, self._missing(demand))]
        alone = self._decode_only(demand, explanations)
        if alone is None:
            return [over_two or NoWay(Route.COLD, misses.NO_DECODE)]
        if over_two is None:
            return [replace(alone, fallback=True)]
        lacks = demand.token_count - self._estimator.had(demand, alone.decode)
        return [over_two, alone] if lacks <= self._limits.alone_tokens else [over_two]

    def _may_be_short(self, demand: Demand) -> bool:
        """Tells whether a decode engine may have to compute so little that it need not be left to a prefill engine.

        What it has cached is a guess. Should it have nothing, it still does not compute more than a holder may.
        """
        limits = self._limits
        most = limits.alone_tokens if demand.held else max(limits.alone_tokens, limits.append_tokens)
        return self._policy.prefer is None and demand.token_count <= most

    def _over_two(self, demand: Demand, explanations: Explanations | None) -> Plan | None:
        prefill = self._run(Leg.PREFILL, demand.with_partners(*self._decodes(demand)), explanations)
        if prefill is None:
            return None
        decode = self._run(Leg.DECODE, demand.with_partners(prefill), explanations)
        if decode is None:
            return None
        return Plan(Route.COLD, prefill, decode, self._estimator.cold(demand, prefill, decode))

    def _decode_only(self, demand: Demand, explanations: Explanations | None) -> Plan | None:
        decode = self._run(Leg.ALONE, demand, explanations)
        return None if decode is None else Plan(Route.COLD, None, decode, self._estimator.alone(demand, decode))

    # What ways are made of

    def _decodes(self, demand: Demand) -> Sequence[Target]:
        return _admitted(self._reach.able(Role.DECODE, demand.model), demand)

    def _missing(self, demand: Demand) -> str:
        return misses.NO_PREFILL if self._decodes(demand) else misses.NO_DECODE

    def _run(self, leg: Leg, demand: Demand, explanations: Explanations | None) -> Target | None:
        if explanations is None:
            able = self._reach.paired(leg, demand)
            answers = ROLES[leg] is Role.DECODE
            return self._profiles[leg].pick(demand, leg, _admitted(able, demand) if answers else able)
        # Whoever asks is told of all engines that do such work, those too of which the table knows that they cannot.
        every = [*targets_of(node for node in self._table if node.role is ROLES[leg])]
        return self._profiles[leg].run(demand, leg, every, explanations.setdefault(leg, ProfileExplanation()))

    def _unread(self, holder: Target, model: str) -> str:
        """Returns why nobody reads: nobody can, nobody verifies, or who would failed to a moment ago."""
        readers = self._reach.able(Role.PREFILL, model)
        fitting = keep_compatible(readers, [holder], read=False)
        verifying = [reader for reader in fitting if reader.reuse and same_connector(reader, holder)]
        if fitting and not verifying:
            return misses.NO_CONNECTOR
        return misses.PAIR_APART if keep_compatible(verifying, [holder], read=True) else misses.INCOMPATIBLE

    def _token_reader(self, demand: Demand) -> Target | None:
        """Returns a prefill engine that takes what it is told for the prompt's. Nobody verifies there.

        So its weights must be known to be the holder's.
        """
        assert demand.held is not None
        holder = demand.held.holder
        stock = [
            target
            for target in self._reach.able(Role.PREFILL, demand.model)
            if target.node.stock and same_weights(target.node, holder.node)
        ]
        return self._profiles[Leg.PREFILL].run(demand.with_partners(holder), Leg.PREFILL, stock)

    def _reachable(self, holder: Target, leg: Leg, demand: Demand) -> bool:
        """Tells whether a holder should be used: filters leave it, and it is well, or no other decode node is."""
        if holder.node.node_id in demand.tried or not demand.admits(holder.node):
            return False
        if not self._profiles[leg].admits(demand, leg, holder):
            return False
        if self._well(holder.node):
            return True
        return not any(map(self._well, self._table.ready(Role.DECODE, demand.model)))


def _admitted(decodes: Sequence[Target], demand: Demand) -> Sequence[Target]:
    if demand.endpoints is None:
        return decodes
    return [target for target in decodes if demand.admits(target.node)]


def _least(plans: Sequence[Plan]) -> Plan | None:
    """Returns the plan with the least estimate, the first of those that are as good as equal."""
    least = min((plan.estimate.total_s for plan in plans), default=0.0)
    return next((plan for plan in plans if plan.estimate.total_s <= least * (1 + TIE)), None)
