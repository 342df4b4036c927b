"""The owner: all engines of one node, their block sets, and who may read them.

It is told what happened (`handle`, `claim` and its siblings), keeps everything in memory and answers with the effects
that the shell must perform, in order. It never waits and reads no clock.

Its rules stand where they are applied: those of one set in `life`, of grants in `granting`, of what connectors bring
and of the fence in `replay`, of asked-for releases in `releasing`, of those that retention demands in `retaining`.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.block_set import BlockSet, EngineFacts
from backhaul_node_agent.core.claim_book import SetName
from backhaul_node_agent.core.engine_clock import EngineClock
from backhaul_node_agent.core.engine_loads import Retention
from backhaul_node_agent.core.granting import ClaimRequest, Grant, Granting, Refusal
from backhaul_node_agent.core.holdings import Engine, Holdings
from backhaul_node_agent.core.life import Limits, State
from backhaul_node_agent.core.releasing import ReleaseOutcome, Releasing
from backhaul_node_agent.core.replay import Replay
from backhaul_node_agent.core.retaining import Retaining
from backhaul_node_agent.core.retention.gaps import Gaps
from backhaul_node_agent.core.retention.policy import Benefit, Policy
from backhaul_node_agent.core.tally import Tally


@dataclass(frozen=True, slots=True)
class HeldSet:
    """A block set as listings show it."""

    name: SetName
    block_set: BlockSet
    state: State
    remaining_s: float
    """At the least; 0 when unknown or over."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Blocks of all engines together."""

    block_count: int
    free_count: int | None
    """Of engines whose connector says it; None when none does, as with prefill engines."""
    retained_count: int
    budget_count: int


class Owner:
    """Owns what the engines of one node retain."""

    def __init__(self, *, session: str, limits: Limits, policy: Callable[[Gaps], Policy] = Benefit) -> None:
        """`policy` is made with the gaps that are learnt here."""
        gaps = Gaps()
        self._held = Holdings(limits, gaps)
        self._granting = Granting(self._held)
        self._retaining = Retaining(self._held, policy(gaps))
        self._replay = Replay(self._held, session, self._retaining)
        self._releasing = Releasing(self._held)

    # --- what the shell may look at

    @property
    def draining(self) -> bool:
        """Whether the node is being drained."""
        return self._held.draining

    @property
    def set_count(self) -> int:
        """Sets known, in whatever state."""
        return sum(len(engine.lives) for engine in self._held.engines.values())

    @property
    def tally(self) -> Tally:
        """What became of sets."""
        return self._held.tally

    @property
    def unpublished_count(self) -> int:
        """Sets that cannot be found yet."""
        return sum(len(engine.unpublished) for engine in self._held.engines.values())

    def state_counts(self) -> dict[State, int]:
        """Counts the sets in each state."""
        counts = Counter(life.state for engine in self._held.engines.values() for life in engine.lives.values())
        return {state: counts[state] for state in State}

    def memory(self) -> MemoryFigures:
        """Returns how full the engines are."""
        engines = self._held.engines.values()
        free = [engine.budget.free_count for engine in engines if engine.budget.free_count is not None]
        return MemoryFigures(
            block_count=sum(engine.facts.block_count for engine in engines),
            free_count=sum(free) if free else None,
            retained_count=sum(engine.budget.pinned_count for engine in engines),
            budget_count=sum(engine.budget.limit for engine in engines),
        )

    def publish_lags_s(self, event: ev.PointersWritten, now: float) -> list[float]:
        """Returns for each set that can be found for the first time how long ago it was asked for."""
        engine = self._held.engines.get(event.engine_id)
        asked = engine.unpublished if engine is not None else {}
        return [now - asked[set_id] for set_id in event.set_ids if set_id in asked]

    def awaited_count(self, *, can_release: bool) -> int:
        """Counts the sets whose end a drain waits for.

        Those of connected engines that somebody may read, or that the engine is being told to free if it can be told.
        """
        lives = (life for engine in self._held.engines.values() if engine.connected for life in engine.lives.values())
        return sum(can_release or life.state is not State.RELEASING for life in lives)

    def engines(self) -> list[EngineFacts]:
        """Returns the engines that are known, by rank."""
        return sorted((engine.facts for engine in self._held.engines.values()), key=lambda facts: facts.rank)

    def fenced_engines(self) -> list[str]:
        """Names the engines with sets behind a fence."""
        return [engine_id for engine_id, engine in self._held.engines.items() if engine.fenced]

    def connected(self, engine_id: str) -> bool:
        """Tells whether the engine's connector is connected and has replayed all."""
        engine = self._held.engines.get(engine_id)
        return engine is not None and engine.connected

    def attached(self, engine_id: str) -> bool:
        """Tells whether the engine's connector is connected, be its replay finished or not."""
        engine = self._held.engines.get(engine_id)
        return engine is not None and engine.connection is not None

    def free_block_count(self, engine_id: str) -> int | None:
        """Returns how many blocks a request could have at once; None when the engine's connector does not say."""
        engine = self._held.engines.get(engine_id)
        return engine.budget.free_count if engine is not None and engine.connected else None

    def retention(self, engine_id: str) -> Retention | None:
        """Returns what sets hold of an engine; None when its connector does not say."""
        engine = self._held.engines.get(engine_id)
        if engine is None or not engine.connected:
            return None
        return Retention(len(engine.lives), engine.budget.pinned_count, engine.budget.limit)

    def lease_valid(self, now: float) -> bool:
        """Tells whether the node's lease is certainly valid."""
        return now < self._held.valid_until

    def clock(self, engine_id: str) -> EngineClock | None:
        """Returns what the connector's pings say of an engine's clock; None without a connector."""
        engine = self._held.engines.get(engine_id)
        return engine.clock if engine is not None and engine.connected else None

    def sets(self, now: float) -> Iterator[HeldSet]:
        """Yields all sets, in no order."""
        for engine_id, engine in self._held.engines.items():
            at = self._held.instant(engine, now)
            for set_id, life in engine.lives.items():
                # A clock that jumped leaves deadlines without an end.
                remaining = max(0.0, life.deadline - at.latest) if math.isfinite(life.deadline) else 0.0
                yield HeldSet(SetName(engine_id, set_id), life.block_set, life.state, remaining)

    # --- events

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Takes in what happened and returns what to do, in order."""
        match event:
            case ev.EngineConnected():
                return self._replay.connect(event, now)
            case ev.ConnectorLost():
                return self._replay.disconnect(event, now)
            case ev.EngineGone():
                return self._held.forget(event.engine_id)
            case ev.LeaseHeld():
                return self._hold_lease(event, now)
            case ev.LeaseLost():
                self._held.valid_until = 0.0
                return []
            case ev.PublisherUp():
                return self._set_publishing(event.engine_id, True, now)
            case ev.PublisherDown():
                return self._set_publishing(event.engine_id, False, now)
            case ev.PointersWritten():
                return self._retaining.published(event)
            case ev.PointersRemoved():
                return self._held.step_known(event.engine_id, event.set_ids, lf.PointerGone(), now)
            case ev.DrainAsked():
                return self._releasing.drain(now)
            case ev.RetentionDue():
                return self._retaining.tick(now)
            case ev.TimePassed():
                return self._tick(now)
            case _:
                return self._hear(event, now)

    def _hear(self, event: ev.Event, now: float) -> list[ev.Effect]:
        assert isinstance(
            event,
            ev.WeightsKnown
            | ev.Reported
            | ev.ReplayFinished
            | ev.SetsFreed
            | ev.DeadlinesConfirmed
            | ev.ClockObserved
            | ev.MemorySeen,
        )
        engine = self._held.engines.get(event.engine_id)
        if engine is None or engine.connection != event.connection:
            return []
        match event:
            case ev.WeightsKnown():
                engine.facts = replace(
                    engine.facts,
                    weights_digest=event.weights_digest,
                    problem=engine.facts.problem or event.problem,
                )
                return []
            case ev.Reported():
                return self._replay.report(engine, event, now)
            case ev.ReplayFinished():
                return self._replay.finish(engine, now)
            case ev.SetsFreed():
                return self._held.step_known(event.engine_id, event.set_ids, lf.Freed(), now)
            case ev.DeadlinesConfirmed():
                return self._confirm_deadlines(event, now)
            case ev.ClockObserved():
                return self._observe_clock(engine, event, now)
            case ev.MemorySeen():
                engine.budget.saw(free_count=event.free_count, waiting_count=event.waiting_count)
                return self._retaining.make_room(engine, now)

    def _hold_lease(self, event: ev.LeaseHeld, now: float) -> list[ev.Effect]:
        self._held.valid_until = event.valid_until
        if event.joined:
            self._held.joined_at = now
        return []

    def _set_publishing(self, engine_id: str, up: bool, now: float) -> list[ev.Effect]:
        engine = self._held.engines.get(engine_id)
        if engine is None:
            return []
        engine.publishing = up
        return [] if up else self._held.step_known(engine_id, list(engine.lives), lf.PointerGone(), now)

    def _confirm_deadlines(self, event: ev.DeadlinesConfirmed, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for set_id, deadline in event.deadlines.items():
            effects += self._held.step_known(event.engine_id, [set_id], lf.Confirmed(deadline), now)
        return effects

    def _observe_clock(self, engine: Engine, event: ev.ClockObserved, now: float) -> list[ev.Effect]:
        before = engine.clock
        engine.clock = before.observe(sent=event.sent, engine_now=event.engine_now, received=event.received)
        if engine.clock.jump_count == before.jump_count:
            return []
        return self._held.step_known(event.engine_id, list(engine.lives), lf.ClockJumped(), now)

    def _tick(self, now: float) -> list[ev.Effect]:
        self._held.claims.expire(now)
        self._held.conversations.tick(now)
        effects = self._replay.forget_away(now)
        for engine in self._held.engines.values():
            at = self._held.instant(engine, now)
            fence_over = self._replay.fence_over(engine, now)
            passed, lifted = lf.Tick(), lf.FenceLifted()
            for life in list(engine.lives.values()):
                event = lifted if fence_over and life.state is State.FENCED else passed
                # Thousands wait for their time; what is not due costs next to nothing.
                unheard = life.pointer is lf.Pointer.REMOVING and not engine.publishing
                if unheard or lf.changes(life, event, at, self._held.limits):
                    effects += self._held.step(engine, life, event, now)
        return effects

    # --- calls

    def claim(self, request: ClaimRequest, now: float) -> tuple[Grant | Refusal, list[ev.Effect]]:
        """Grants a set, or says why not: see `Granting.claim`."""
        return self._granting.claim(request, now)

    def confirm(self, request: ClaimRequest, now: float) -> Refusal | None:
        """Tells whether a grant may be answered now: None, or why not."""
        return self._granting.confirm(request, now)

    def abandon(self, request_id: str, now: float) -> list[ev.Effect]:
        """Takes back a grant that was never answered."""
        return self._granting.abandon(request_id, now)

    def give_back(self, request_id: str, now: float) -> list[ev.Effect]:
        """Takes back a claim that its router returned, and remembers the return."""
        return self._granting.give_back(request_id, now)

    def fenced(self, scope: str, keys: Collection[str]) -> list[str]:
        """Returns the sets behind a fence under one of the keys."""
        return self._releasing.fenced(scope, keys)

    def release(self, set_ids: Sequence[str], now: float) -> tuple[ReleaseOutcome, list[ev.Effect]]:
        """Releases the sets that may be released, notes the others, leaves unknown ids alone."""
        return self._releasing.release(set_ids, now)

    def release_hand_off(self, engine_id: str, hand_off_id: str) -> list[ev.Effect] | str:
        """Frees a hand-off that nobody will read; a reason when it is none of these engines'."""
        return self._releasing.hand_off(engine_id, hand_off_id)

    def renew(self, set_ids: Sequence[str]) -> tuple[list[str], list[str], list[ev.Effect]]:
        """Asks for more time for the sets that are known; returns them, the unknown ids, and the effects."""
        return self._releasing.renew(set_ids)
