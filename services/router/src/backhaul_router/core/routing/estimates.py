"""How long it takes until a turn's first token is there, by each route.

An engine serves what it was sent first first. vLLM's scheduler begins waiting requests with what the running ones leave
of a step's tokens (`v1/core/sched/scheduler.py`), so what takes a hand-off, too, waits behind prompts that a decode
engine computes itself; but a decode engine works them off while the prefill engine is still busy.
"""

from dataclasses import dataclass

from backhaul_router.core.load import Load
from backhaul_router.core.nodes import Role
from backhaul_router.core.routing.costs import Costs
from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.prefixes import Prefixes
from backhaul_router.core.routing.reports import Reports
from backhaul_router.core.routing.target import Target, TargetKey


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time until the first token, in seconds, by what it goes to."""

    wait_s: float = 0.0
    """Others' turn."""
    prefill_s: float = 0.0
    """Computing the prompt, or what is new of it."""
    move_s: float = 0.0
    """Handing it off, and the first token."""
    penalty_s: float = 0.0
    """What computing a prompt costs the answers that the engine is busy with."""

    @property
    def ttft_s(self) -> float:
        """Returns what the turn itself will take until its first token: all but what it costs others."""
        return self.wait_s + self.prefill_s + self.move_s

    @property
    def total_s(self) -> float:
        """Returns all of it."""
        return self.wait_s + self.prefill_s + self.move_s + self.penalty_s


class Estimator:
    """Estimates legs and routes by what is known at this moment."""

    def __init__(self, load: Load, costs: Costs, prefixes: Prefixes, reports: Reports, *, disturbance: float) -> None:
        """``disturbance``: what a second of computing a prompt costs each answer that the engine is giving, seconds."""
        self._load = load
        self._costs = costs
        self._prefixes = prefixes
        self._reports = reports
        self._disturbance = disturbance

    # Legs

    def leg_s(self, demand: Demand, leg: Leg, target: Target) -> float:
        """Returns wait and work of a leg at a target, seconds."""
        if leg is Leg.ALONE:
            return self.alone(demand, target).total_s
        if leg is Leg.DECODE:
            return self._wait_s(target) + self._decode_s(demand, target)
        held = demand.held_tokens if leg is Leg.READ else 0
        return self._wait_s(target) + self._prefill_s(demand, target, held)

    def others_before(self, target: Target) -> float:
        """Returns how many legs of other routers a target has to compute before one that is sent now.

        Of a decode engine only those that wait: it goes on with its answers meanwhile.
        """
        report = self._reports.of(target.key)
        if report is None or (total := report.running + report.waiting) <= 0:
            return 0.0
        others = max(total - self._load.recent(target.key), 0)
        return others if _prefills(target) else report.waiting * others / total

    # Routes

    def cold(self, demand: Demand, prefill: Target, decode: Target) -> Estimate:
        """``prefill`` computes the prompt, but for what it has cached, and ``decode`` takes it over."""
        return self._over_two(demand, prefill, decode, held=0)

    def warm(self, demand: Demand, prefill: Target) -> Estimate:
        """``prefill`` reads what the holder has, computes the rest, and the holder takes over what it lacks.

        Raises ValueError when nobody holds anything.
        """
        return self._over_two(demand, prefill, _holder(demand), held=demand.held_tokens)

    def append(self, demand: Demand) -> Estimate:
        """The holder computes what it lacks. Raises ValueError when nobody holds anything."""
        return self.alone(demand, _holder(demand))

    def alone(self, demand: Demand, decode: Target) -> Estimate:
        """``decode`` computes the prompt, but for what it holds or has cached."""
        computed = max(demand.token_count - self.had(demand, decode), 1)
        compute_s = self._costs.alone_s(decode.key, computed=computed)
        # What it costs to be answered there at all, a hand-off costs as well: nobody's answer waits for that.
        more_s = max(compute_s - self._costs.alone_s(decode.key, computed=0), 0.0)
        penalty_s = self._disturbance * self._answering(decode.key) * more_s
        return Estimate(self._wait_s(decode), compute_s, penalty_s=penalty_s)

    def had(self, demand: Demand, target: Target) -> int:
        """Returns the tokens of the prompt that a target has."""
        return self._prefixes.had(target, demand)

    def _over_two(self, demand: Demand, prefill: Target, decode: Target, *, held: int) -> Estimate:
        wait_s, prefill_s = self._wait_s(prefill), self._prefill_s(demand, prefill, held)
        still_s = max(self._wait_s(decode) - wait_s - prefill_s, 0.0)
        return Estimate(wait_s + still_s, prefill_s, self._decode_s(demand, decode))

    # Work

    def _prefill_s(self, demand: Demand, target: Target, held: int) -> float:
        """``held``: tokens that it can read."""
        cached = self.had(demand, target)
        computed = max(demand.token_count - max(held, cached), 1)
        return self._costs.prefill_s(target.key, computed=computed, read=max(held - cached, 0))

    def _decode_s(self, demand: Demand, target: Target) -> float:
        return self._costs.decode_s(target.key, moved=max(demand.token_count - self.had(demand, target), 0))

    # What is there already

    def _wait_s(self, target: Target) -> float:
        """Returns how long until what is there already is served, this router's and others'."""
        wait_s = self._load.wait_s(target.key)
        others = self.others_before(target)
        if not others:
            return wait_s
        typical = self._costs.typical_prefill_s if _prefills(target) else self._costs.typical_alone_s
        return wait_s + others * typical(target.key)

    def _answering(self, key: TargetKey) -> int:
        """Returns the answers that a decode engine is busy with."""
        report = self._reports.of(key)
        return max(self._load.count(key) - self._load.queued(key), report.running if report else 0)


def _prefills(target: Target) -> bool:
    return target.node.role is Role.PREFILL


def _holder(demand: Demand) -> Target:
    if demand.held is None:
        raise ValueError("no engine holds anything of this turn's conversation")
    return demand.held.holder
