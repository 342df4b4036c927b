"""All engines and block sets of one node, and the one way in which the life of a set goes on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.block_set import BlockSet, EngineFacts
from backhaul_node_agent.core.claim_book import ClaimBook, SetName
from backhaul_node_agent.core.engine_clock import EngineClock
from backhaul_node_agent.core.life import Action, Instant, Life, Limits, State
from backhaul_node_agent.core.retention.budget import EngineBudget
from backhaul_node_agent.core.retention.conversations import Conversations
from backhaul_node_agent.core.retention.gaps import Gaps
from backhaul_node_agent.core.retention.ranking import Ranking
from backhaul_node_agent.core.retention.renewing import Renewals
from backhaul_node_agent.core.schedule import Schedule
from backhaul_node_agent.core.tally import End, Tally


@dataclass(slots=True)
class Engine:
    """One incarnation. Only the owner's parts change it."""

    facts: EngineFacts
    budget: EngineBudget
    renewals: Renewals = field(default_factory=Renewals)
    lives: dict[str, Life] = field(default_factory=dict)
    clock: EngineClock = field(default_factory=EngineClock)
    connection: int | None = None
    """The current connection; None while the connector is away."""
    away_since: float = 0.0
    """While the connector is away: agent's clock, since when."""
    missing: set[str] | None = None
    """While a replay runs: known sets that it has not named yet."""
    foreign: bool = True
    """Whether another agent may have granted what the engine replays next."""
    fenced_from: float = 0.0
    """When the last connection began that brought sets of another agent."""
    publishing: bool = False
    ranking: Ranking = field(default_factory=Ranking)
    superseded: dict[str, None] = field(default_factory=dict)
    """Sets that nobody needs any more, until they are released or gone."""
    fenced: dict[str, None] = field(default_factory=dict)
    """Sets that are FENCED."""
    schedule: Schedule = field(default_factory=Schedule)
    """Which sets time can do something to, and when."""
    unpublished: dict[str, float] = field(default_factory=dict)
    """Sets whose pointers have been asked for and are not durable yet, by when they were asked for (agent's clock)."""

    @property
    def connected(self) -> bool:
        """Whether the connector is connected and has replayed all."""
        return self.connection is not None and self.missing is None


class Holdings:
    """What the parts of the owner share."""

    def __init__(self, limits: Limits, gaps: Gaps) -> None:
        self.limits = limits
        self.conversations = Conversations(gaps, max_age_s=limits.max_retention_s)
        self.engines: dict[str, Engine] = {}
        self.claims = ClaimBook(limits.claim_ttl_s)
        self.valid_until = 0.0
        """Agent's clock: until then the node's lease is certainly valid."""
        self.joined_at: float | None = None
        """Agent's clock: when the lease began; None before the first one."""
        self.draining = False
        self.tally = Tally()
        self.telling = False
        """Whether engines can be told to free or to keep blocks."""

    def engine(self, facts: EngineFacts) -> Engine:
        """Returns an engine, new or known, with what is said of it now."""
        engine = self.engines.get(facts.engine_id)
        if engine is None:
            share, mark = self.limits.retained_share, self.limits.pressure_mark
            engine = Engine(facts, EngineBudget(facts.block_count, share=share, mark=mark))
            self.engines[facts.engine_id] = engine
        engine.facts = facts
        return engine

    def holder_of(self, set_id: str) -> Engine | None:
        """Returns the engine that holds a set."""
        return next((engine for engine in self.engines.values() if set_id in engine.lives), None)

    def forget(self, engine_id: str) -> list[ev.Effect]:
        """Ends an incarnation with its sets and claims."""
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return []
        self.tally.ends[End.ENGINE_GONE] += len(engine.lives)
        for life in engine.lives.values():
            if life.claim is not None:
                self.claims.drop(life.claim.request_id)
        return [ev.ForgetEngine(engine_id)]

    def instant(self, engine: Engine, now: float) -> Instant:
        """Returns now by both clocks, and whether this agent certainly owns the engine."""
        owner = engine.connected and now < self.valid_until
        if not engine.clock.trusted:
            return Instant(now, owner=owner)
        return Instant(now, engine.clock.earliest(now), engine.clock.latest(now), owner)

    def step_known(self, engine_id: str, set_ids: Sequence[str], event: lf.Event, now: float) -> list[ev.Effect]:
        """Applies an event to those of the sets that are known."""
        engine = self.engines.get(engine_id)
        if engine is None:
            return []
        lives = [engine.lives[set_id] for set_id in dict.fromkeys(set_ids) if set_id in engine.lives]
        return [effect for life in lives for effect in self.step(engine, life, event, now)]

    def step(self, engine: Engine, life: Life, event: lf.Event, now: float) -> list[ev.Effect]:
        """Applies an event to a set."""
        outcome = lf.step(life, event, self.instant(engine, now), self.limits)
        effects = self.take(engine, life.block_set.set_id, life, outcome, now)
        after = outcome.life
        self.tally.note(life, event, after)
        unwanted = life.release_wanted or life.block_set.set_id in engine.superseded
        if not unwanted and _let_go(life, event, after):
            effects.append(ev.LetGo(engine.facts.engine_id, life.block_set))
        if after is not None and after.pointer is lf.Pointer.REMOVING and not engine.publishing:
            # Nobody will acknowledge the removal.
            effects += self.step(engine, after, lf.PointerGone(), now)
        return effects

    def take(self, engine: Engine, set_id: str, before: Life | None, outcome: lf.Step, now: float) -> list[ev.Effect]:
        """Keeps what a step made of a set; returns what is to be done."""
        after = outcome.life
        self._watch(engine, SetName(engine.facts.engine_id, set_id), before, after, now)
        if Action.PUBLISH in outcome.actions:
            engine.unpublished[set_id] = now
        if before is not None and before.claim is not None and (after is None or after.claim is None):
            self.claims.drop(before.claim.request_id)
        if after is None:
            del engine.lives[set_id]
        else:
            engine.lives[set_id] = after
        block_set = after.block_set if after is not None else before.block_set if before is not None else None
        assert block_set is not None
        return [_effect(action, engine.facts.engine_id, block_set) for action in outcome.actions]

    def _watch(self, engine: Engine, name: SetName, before: Life | None, after: Life | None, now: float) -> None:
        """Keeps the budget and the conversations as the lives of sets are."""
        claimed, claims = before is not None and before.claim is not None, after is not None and after.claim is not None
        if claims and not claimed:
            self.conversations.claimed(name, now)
        if claimed and after is not None and after.state is State.HELD:
            self.conversations.given_back(name)
        elif claimed and not claims:
            self.conversations.claim_ended(name, now)
        if after is not None and after.state is State.FENCED:
            engine.fenced[name.set_id] = None
        else:
            engine.fenced.pop(name.set_id, None)
        held_before, held = (life is not None and life.state is State.HELD for life in (before, after))
        if held and not held_before:
            engine.ranking.add(name.set_id)
        elif held_before and not held:
            engine.ranking.drop(name.set_id)
        engine.schedule.follow(name.set_id, after)
        if after is None:
            assert before is not None
            engine.budget.freed(name.set_id, before.block_set.all_block_ids)
            engine.renewals.gone(name.set_id)
            engine.superseded.pop(name.set_id, None)
        elif after.state is State.RELEASING:
            engine.budget.release(name.set_id, after.block_set.all_block_ids)
        else:
            engine.budget.retain(name.set_id, after.block_set.all_block_ids)
        if after is None or after.pointer is not lf.Pointer.PUBLISHED:
            engine.unpublished.pop(name.set_id, None)


def _let_go(before: Life, event: lf.Event, after: Life | None) -> bool:
    """Tells whether a set ended though somebody may come back for it: for want of room, by its time, or unread."""
    match event:
        case lf.ReleaseAsked(for_room=True):
            return before.state is State.HELD
        case lf.Tick():
            return before.state in (State.HELD, State.CLAIMED) and after is not None and after.state is State.RELEASING
        case lf.Freed():
            return before.state is State.HELD
        case _:
            return False


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
