"""The owner: all engines of one node, their block sets, and who may read them.

It is told what happened (`handle`, `claim` and its siblings), keeps everything in memory and answers with the effects
that the shell must perform, in order. It never waits and reads no clock.

Rules that hold over all sets (those of one set stand in `life`):
- A grant needs the node's own lease valid by the agent's clock, a connector that is connected and has replayed all, a
  trusted engine clock, equal weights digests, and a node that is not draining.
- A release needs the lease and the connector as a grant does: whoever else owns the engine may have granted the set.
- An engine that another agent may have been connected to is fenced: what it replays is neither granted nor released
  until every claim that the other agent can have made has lapsed, counted from the later of join and connection.
- Ids that no connector reported are never touched: other requests' hand-offs live among the engine's leases too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.block_set import BlockSet, EngineFacts
from backhaul_node_agent.core.claim_book import ClaimBook, SetName
from backhaul_node_agent.core.engine_clock import EngineClock
from backhaul_node_agent.core.life import Action, Instant, Life, Limits, State


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What a router asks for."""

    request_id: str
    set_id: str
    engine_id: str
    scope: str
    weights_digest: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A claim that may be answered, once the connector has been told and `confirm` agreed."""

    name: SetName
    block_set: BlockSet
    deadline: float
    """Engine's clock."""
    ttl_s: float
    """Time until then, at the least."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no grant."""

    reason: str
    message: str


@dataclass(slots=True)
class _Engine:
    """One incarnation. Only the owner changes it."""

    facts: EngineFacts
    lives: dict[str, Life] = field(default_factory=dict)
    clock: EngineClock = field(default_factory=EngineClock)
    connection: int | None = None
    """The current connection; None while the connector is away."""
    connected_at: float = 0.0
    missing: set[str] | None = None
    """While a replay runs: known sets that it has not named yet."""
    foreign: bool = True
    """Whether another agent may have granted what the engine replays next."""
    fenced_from: float = 0.0
    """When the last connection began that brought sets of another agent."""
    publishing: bool = False

    @property
    def connected(self) -> bool:
        return self.connection is not None and self.missing is None


@dataclass(frozen=True, slots=True)
class HeldSet:
    """A block set as listings show it."""

    name: SetName
    block_set: BlockSet
    state: State
    remaining_s: float
    """At the least; 0 when unknown or over."""


@dataclass(slots=True)
class ReleaseOutcome:
    """What became of a request to release sets."""

    released: list[str] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class Owner:
    """Owns what the engines of one node retain."""

    def __init__(self, *, session: str, limits: Limits) -> None:
        self._session = session
        self._limits = limits
        self._engines: dict[str, _Engine] = {}
        self._claims = ClaimBook(limits.claim_ttl_s)
        self._valid_until = 0.0
        self._joined_at: float | None = None
        self._draining = False

    # --- what the shell may look at

    @property
    def draining(self) -> bool:
        """Whether the node is being drained."""
        return self._draining

    @property
    def set_count(self) -> int:
        """Sets known, in whatever state."""
        return sum(len(engine.lives) for engine in self._engines.values())

    @property
    def removing(self) -> bool:
        """Whether sets that the engine can be told of are still to be freed."""
        lives = (life for engine in self._engines.values() if engine.connected for life in engine.lives.values())
        return any(life.state is State.RELEASING for life in lives)

    def engines(self) -> list[EngineFacts]:
        """Returns the engines that are known, by rank."""
        return sorted((engine.facts for engine in self._engines.values()), key=lambda facts: facts.rank)

    def connected(self, engine_id: str) -> bool:
        """Tells whether the engine's connector is connected and has replayed all."""
        engine = self._engines.get(engine_id)
        return engine is not None and engine.connected

    def attached(self, engine_id: str) -> bool:
        """Tells whether the engine's connector is connected, be its replay finished or not."""
        engine = self._engines.get(engine_id)
        return engine is not None and engine.connection is not None

    def sets(self, now: float) -> Iterator[HeldSet]:
        """Yields all sets, in no order."""
        for engine_id, engine in self._engines.items():
            at = self._instant(engine, now)
            for set_id, life in engine.lives.items():
                remaining = max(0.0, life.deadline - at.latest)
                yield HeldSet(SetName(engine_id, set_id), life.block_set, life.state, remaining)

    # --- events

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Takes in what happened and returns what to do, in order."""
        match event:
            case ev.EngineConnected():
                return self._connect(event, now)
            case ev.ConnectorLost():
                return self._disconnect(event)
            case ev.EngineGone():
                return self._forget(event.engine_id)
            case ev.LeaseHeld():
                return self._hold_lease(event, now)
            case ev.LeaseLost():
                self._valid_until = 0.0
                return []
            case ev.PublisherUp():
                return self._set_publishing(event.engine_id, True, now)
            case ev.PublisherDown():
                return self._set_publishing(event.engine_id, False, now)
            case ev.PointersRemoved():
                return self._step_known(event.engine_id, event.set_ids, lf.PointerGone(), now)
            case ev.DrainAsked():
                return self._drain(now)
            case ev.TimePassed():
                return self._tick(now)
            case _:
                return self._hear(event, now)

    def _hear(self, event: ev.Event, now: float) -> list[ev.Effect]:
        assert isinstance(
            event,
            ev.WeightsKnown | ev.Reported | ev.ReplayFinished | ev.SetsFreed | ev.DeadlinesConfirmed | ev.ClockObserved,
        )
        engine = self._engines.get(event.engine_id)
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
                return self._report(engine, event, now)
            case ev.ReplayFinished():
                return self._finish_replay(engine, now)
            case ev.SetsFreed():
                return self._step_known(event.engine_id, event.set_ids, lf.Freed(), now)
            case ev.DeadlinesConfirmed():
                return self._confirm_deadlines(engine, event, now)
            case ev.ClockObserved():
                return self._observe_clock(engine, event, now)

    def _connect(self, event: ev.EngineConnected, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for other in list(self._engines.values()):
            if other.facts.rank == event.facts.rank and other.facts.engine_id != event.facts.engine_id:
                effects += self._forget(other.facts.engine_id)
        engine = self._engines.setdefault(event.facts.engine_id, _Engine(event.facts))
        engine.facts = event.facts
        engine.connection, engine.connected_at = event.connection, now
        engine.missing = set(engine.lives)
        # `foreign` outlives a connection that was cut in the middle of its replay.
        engine.foreign = engine.foreign or event.last_session != self._session
        if engine.foreign:
            engine.fenced_from = now
        return effects

    def _disconnect(self, event: ev.ConnectorLost) -> list[ev.Effect]:
        engine = self._engines.get(event.engine_id)
        if engine is not None and engine.connection == event.connection:
            engine.connection = None
        return []

    def _forget(self, engine_id: str) -> list[ev.Effect]:
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return []
        for life in engine.lives.values():
            if life.claim is not None:
                self._claims.drop(life.claim.request_id)
        return [ev.ForgetEngine(engine_id)]

    def _hold_lease(self, event: ev.LeaseHeld, now: float) -> list[ev.Effect]:
        self._valid_until = event.valid_until
        if event.joined:
            self._joined_at = now
        return []

    def _set_publishing(self, engine_id: str, up: bool, now: float) -> list[ev.Effect]:
        engine = self._engines.get(engine_id)
        if engine is None:
            return []
        engine.publishing = up
        return [] if up else self._step_known(engine_id, list(engine.lives), lf.PointerGone(), now)

    def _report(self, engine: _Engine, event: ev.Reported, now: float) -> list[ev.Effect]:
        set_id = event.block_set.set_id
        if engine.missing is not None:
            engine.missing.discard(set_id)
        known = engine.lives.get(set_id)
        if known is not None:
            return self._step(engine, known, self._report_of_known(engine, event), now)
        if event.replayed and engine.foreign:
            outcome = lf.found(event.block_set, event.deadline, granted=event.granted)
        elif event.granted:
            outcome = lf.adopted(event.block_set, event.deadline, self._instant(engine, now), self._limits)
        else:
            outcome = lf.born(event.block_set, event.deadline)
        effects = self._take(engine, set_id, None, outcome)
        if self._draining:
            effects += self._step_known(event.engine_id, [set_id], lf.ReleaseAsked(), now)
        return effects

    def _report_of_known(self, engine: _Engine, event: ev.Reported) -> lf.Event:
        if not event.replayed:
            return lf.Confirmed(event.deadline)
        if engine.foreign:
            return lf.Found(event.granted, event.deadline)
        return lf.Seen(event.granted, event.deadline)

    def _finish_replay(self, engine: _Engine, now: float) -> list[ev.Effect]:
        missing, engine.missing, engine.foreign = engine.missing, None, False
        return self._step_known(engine.facts.engine_id, list(missing or ()), lf.Freed(), now)

    def _confirm_deadlines(self, engine: _Engine, event: ev.DeadlinesConfirmed, now: float) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for set_id, deadline in event.deadlines.items():
            effects += self._step_known(engine.facts.engine_id, [set_id], lf.Confirmed(deadline), now)
        return effects

    def _observe_clock(self, engine: _Engine, event: ev.ClockObserved, now: float) -> list[ev.Effect]:
        before = engine.clock
        engine.clock = before.observe(sent=event.sent, engine_now=event.engine_now, received=event.received)
        if engine.clock.jump_count == before.jump_count:
            return []
        return self._step_known(event.engine_id, list(engine.lives), lf.ClockJumped(), now)

    def _drain(self, now: float) -> list[ev.Effect]:
        self._draining = True
        return [
            effect
            for engine_id, engine in self._engines.items()
            for effect in self._step_known(engine_id, list(engine.lives), lf.ReleaseAsked(), now)
        ]

    def _tick(self, now: float) -> list[ev.Effect]:
        self._claims.expire(now)
        effects: list[ev.Effect] = []
        for engine in self._engines.values():
            for life in list(engine.lives.values()):
                lifted = life.state is State.FENCED and self._fence_over(engine, now)
                effects += self._step(engine, life, lf.FenceLifted() if lifted else lf.Tick(), now)
        return effects

    def _fence_over(self, engine: _Engine, now: float) -> bool:
        if self._joined_at is None or not engine.connected:
            return False
        start = max(self._joined_at, engine.fenced_from)
        return now >= start + self._limits.claim_ttl_s + self._limits.margin_s

    # --- calls

    def claim(self, request: ClaimRequest, now: float) -> tuple[Grant | Refusal, list[ev.Effect]]:
        """Grants a set, or says why not.

        The grant must be given up (`abandon`) unless the connector was told and `confirm` agreed.
        """
        if self._claims.returned(request.request_id, now):
            return Refusal("CLAIM_RETURNED", "a return with this request_id came first"), []
        name = SetName(request.engine_id, request.set_id)
        earlier = self._claims.holder(request.request_id)
        if earlier is not None and earlier != name:
            return Refusal("REQUEST_ID_REUSED", "the request_id claimed another block set"), []
        refusal = self._may_not_grant(request, now)
        if refusal is not None:
            return refusal, []
        if earlier is not None:
            return self._grant_of(name, now), [ev.TellClaimed(name.engine_id, name.set_id)]
        engine = self._engines[name.engine_id]
        life = engine.lives[name.set_id]
        outcome = lf.step(life, lf.ClaimAsked(request.request_id), self._instant(engine, now), self._limits)
        if outcome.refusal:
            return Refusal(outcome.refusal, _MESSAGES[outcome.refusal]), []
        effects = self._take(engine, name.set_id, life, outcome)
        self._claims.add(request.request_id, name)
        return self._grant_of(name, now), effects

    def confirm(self, request: ClaimRequest, now: float) -> Refusal | None:
        """Tells whether a grant may be answered now: None, or why not."""
        if self._claims.holder(request.request_id) != SetName(request.engine_id, request.set_id):
            return Refusal("CLAIM_RETURNED", "the claim was taken back meanwhile")
        return self._may_not_grant(request, now)

    def abandon(self, request_id: str, now: float) -> list[ev.Effect]:
        """Takes back a grant that was never answered."""
        name = self._claims.holder(request_id)
        return [] if name is None else self._step_known(name.engine_id, [name.set_id], lf.ClaimReturned(), now)

    def give_back(self, request_id: str, now: float) -> list[ev.Effect]:
        """Takes back a claim that its router returned, and remembers the return."""
        effects = self.abandon(request_id, now)
        self._claims.mark_returned(request_id, now)
        return effects

    def release(self, set_ids: Sequence[str], now: float) -> tuple[ReleaseOutcome, list[ev.Effect]]:
        """Releases the sets that may be released, notes the others, leaves unknown ids alone."""
        outcome = ReleaseOutcome()
        effects: list[ev.Effect] = []
        for set_id in set_ids:
            engine = self._holder_of(set_id)
            if engine is None:
                outcome.unknown.append(set_id)
                continue
            effects += self._step(engine, engine.lives[set_id], lf.ReleaseAsked(), now)
            now_releasing = engine.lives[set_id].state is State.RELEASING
            (outcome.released if now_releasing else outcome.deferred).append(set_id)
        return outcome, effects

    def renew(self, set_ids: Sequence[str]) -> tuple[list[str], list[str], list[ev.Effect]]:
        """Asks for more time for the sets that are known; returns them, the unknown ids, and the effects."""
        by_engine: dict[str, list[str]] = {}
        unknown: list[str] = []
        for set_id in set_ids:
            engine = self._holder_of(set_id)
            if engine is None:
                unknown.append(set_id)
            else:
                by_engine.setdefault(engine.facts.engine_id, []).append(set_id)
        effects: list[ev.Effect] = [ev.SendRenewal(engine_id, tuple(ids)) for engine_id, ids in by_engine.items()]
        return [set_id for ids in by_engine.values() for set_id in ids], unknown, effects

    # --- helpers

    def _may_not_grant(self, request: ClaimRequest, now: float) -> Refusal | None:
        if self._draining:
            return Refusal("DRAINING", "the node is being drained")
        if now >= self._valid_until:
            return Refusal("LEASE_INVALID", "the node's lease is not valid")
        engine = self._engines.get(request.engine_id)
        if engine is None:
            return Refusal("SET_UNKNOWN", "the engine is not (or no longer) here")
        life = engine.lives.get(request.set_id)
        if life is None or life.block_set.scope != request.scope:
            return Refusal("SET_UNKNOWN", _MESSAGES["SET_UNKNOWN"])
        if not request.weights_digest or request.weights_digest != engine.facts.weights_digest:
            return Refusal("WEIGHTS_MISMATCH", "the engines' weights are not known to be equal")
        if not engine.connected or not engine.clock.trusted:
            return Refusal("CONNECTOR_AWAY", "the engine's connector is not connected, or its clock is not known yet")
        return None

    def _grant_of(self, name: SetName, now: float) -> Grant:
        engine = self._engines[name.engine_id]
        life = engine.lives[name.set_id]
        assert life.claim is not None
        remaining = max(0.0, life.claim.deadline - self._instant(engine, now).latest)
        return Grant(name, life.block_set, life.claim.deadline, remaining)

    def _holder_of(self, set_id: str) -> _Engine | None:
        return next((engine for engine in self._engines.values() if set_id in engine.lives), None)

    def _instant(self, engine: _Engine, now: float) -> Instant:
        owner = engine.connected and now < self._valid_until
        if not engine.clock.trusted:
            return Instant(now, owner=owner)
        return Instant(now, engine.clock.earliest(now), engine.clock.latest(now), owner)

    def _step_known(self, engine_id: str, set_ids: Sequence[str], event: lf.Event, now: float) -> list[ev.Effect]:
        engine = self._engines.get(engine_id)
        if engine is None:
            return []
        lives = [engine.lives[set_id] for set_id in dict.fromkeys(set_ids) if set_id in engine.lives]
        return [effect for life in lives for effect in self._step(engine, life, event, now)]

    def _step(self, engine: _Engine, life: Life, event: lf.Event, now: float) -> list[ev.Effect]:
        outcome = lf.step(life, event, self._instant(engine, now), self._limits)
        effects = self._take(engine, life.block_set.set_id, life, outcome)
        after = outcome.life
        if after is not None and after.pointer is lf.Pointer.REMOVING and not engine.publishing:
            # Nobody will acknowledge the removal.
            effects += self._step(engine, after, lf.PointerGone(), now)
        return effects

    def _take(self, engine: _Engine, set_id: str, before: Life | None, outcome: lf.Step) -> list[ev.Effect]:
        after = outcome.life
        if before is not None and before.claim is not None and (after is None or after.claim is None):
            self._claims.drop(before.claim.request_id)
        if after is None:
            del engine.lives[set_id]
        else:
            engine.lives[set_id] = after
        block_set = after.block_set if after is not None else before.block_set if before is not None else None
        assert block_set is not None
        return [_effect(action, engine.facts.engine_id, block_set) for action in outcome.actions]


def _effect(action: Action, engine_id: str, block_set: BlockSet) -> ev.Effect:
    match action:
        case Action.PUBLISH:
            return ev.Publish(engine_id, block_set)
        case Action.UNPUBLISH:
            return ev.Unpublish(engine_id, block_set)
        case Action.TELL_CLAIMED:
            return ev.TellClaimed(engine_id, block_set.set_id)
        case Action.TELL_RETURNED:
            return ev.TellReturned(engine_id, block_set.set_id)
        case Action.RELEASE:
            return ev.SendRelease(engine_id, block_set.set_id)


_MESSAGES = {
    "SET_UNKNOWN": "the block set was read, released, expired or never was",
    "SET_CLAIMED": "the block set is granted to another request",
    "SET_FENCED": "the block set was found after a restart and may still be granted",
    "SET_EXPIRING": "too little time is left for a read",
}
