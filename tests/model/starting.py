"""States that the world may be found in: what the engine holds, what an agent's table believes, what the index says.

Nothing of it needs to fit together. What a table believes it was told on a connection that is over now, so that it is a
table that an owner can have; everything else is put there. Two things are kept to, since nothing that is drawn could be
safe without them: a claim that somebody may still use is one that the agent granted, or that an earlier agent did, and
then no longer ago than a claim lasts; and pointers that are wrong are under a lease that nobody keeps, or etcd is
another one than the agent wrote to.
"""

from dataclasses import dataclass
from enum import Enum, auto

from backhaul_connector import wire
from backhaul_node_agent import convert
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.claim_book import SetName
from backhaul_node_agent.core.granting import ClaimRequest, Grant
from backhaul_node_agent.core.life import State
from tests.model.agent import LIMITS, AgentProcess
from tests.model.engine import BLOCK_COUNT, SCOPE, WEIGHTS
from tests.model.etcd import Pointer
from tests.model.truth import Given
from tests.model.world import RECONNECT_S, World

_MADE_UP = 0
"""Connection on which a table was told what it believes; real ones count from 1."""
_EDITED_AT = 60


class Belief(Enum):
    """What the table has of a set."""

    NOTHING = auto()
    HELD = auto()
    CLAIMED = auto()
    """By a router, if it may be."""
    ADOPTED = auto()
    """CLAIMED by nobody knows whom."""
    FENCED = auto()
    FENCED_GRANTED = auto()


_FENCED = (Belief.FENCED, Belief.FENCED_GRANTED)


class Lease(Enum):
    """The lease of the agent's node."""

    HELD = auto()
    LOST = auto()
    EXPIRED = auto()
    NEVER_HELD = auto()


class Successor(Enum):
    """Whom the connector connects to next."""

    SAME = auto()
    SAME_AFTER_ANOTHER = auto()
    NEW = auto()
    """An agent that knows nothing, in the place of the one with the table."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A labelled turn: the truth and the belief."""

    conversation: int
    count: int
    edited: bool
    left_s: float
    """Until the engine's deadline, which may be past."""
    gone: bool
    """Whether the engine has freed it."""
    late: bool
    """Whether it ends only when the connector has found an agent: no table knows it yet."""
    marked: bool
    """Whether the connector has noted a grant; not of a late one."""
    claim_left_s: float | None
    """Until which an earlier agent's router may use a claim; None for no claim."""
    belief: Belief
    believed_left_s: float
    release_wanted: bool

    @property
    def tokens(self) -> list[int]:
        """Begins as all turns of its conversation."""
        begin = self.conversation * 1000
        return [begin + at + 500 * (self.edited and at > _EDITED_AT) for at in range(self.count)]


@dataclass(frozen=True, slots=True)
class Found:
    """A pointer that the index has, right or wrong."""

    turn: int
    """Index of its set; beyond the last one for a set that nobody ever reported."""
    conversation: int
    incarnation: int
    """0 for the engine's, 1 for one that nobody knows."""
    lease: int
    """Index into the leases that there are, one that nobody keeps included."""


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that is drawn."""

    rates: tuple[float, float, float]
    retaining: bool
    deaf: bool
    """Whether the registry takes no pointers over, now and later."""
    restarted: bool
    """Whether table and index are full of an earlier incarnation."""
    turns: tuple[Turn, ...]
    foreign_left_s: tuple[float, ...]
    """Until the deadlines of leases that are not ours."""
    running_count: int
    """Blocks of running requests."""
    lease: Lease
    successor: Successor
    notifications: tuple[bool, float]
    """Whether those on their way get lost, and how long they take."""
    repaired_s: float
    """How long those that are sent from now on get lost."""
    ticked: bool
    """Whether the agent could work with what it was told."""
    noticed: bool
    """Whether the agent knows that its connection is over."""
    replayed: int | None
    """Messages of the next connection that have arrived; None while it has not begun."""
    broken: bool
    """Whether that one is over, too."""
    found: tuple[Found, ...]
    restored: bool
    """Whether etcd is another one than the agent wrote to, with just what was found."""
    holder: bool
    """Whether another session has the node's record in that etcd."""


class Beginning:
    """A world in the state that was drawn."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.world = World(start.rates, retaining=start.retaining)
        self.set_ids = [f"set-{at}" for at, _ in enumerate(start.turns)]
        self.foreign: dict[str, float] = {}
        """Leases that are not ours, and their deadlines."""
        self.believer = self.world.agents[0]
        """The agent with the table."""
        self.states: dict[str, State] = {}
        """What it believes."""
        self.world.etcd.deaf = start.deaf
        self._begin()
        reports = self._fill_engine()
        self._tell(reports)
        self._free_what_is_gone()
        self._claim_elsewhere(reports)
        self._end_connection()
        self._connect()
        self._fill_index()
        self.began_at = self.world.now
        self.repaired_at = self.began_at + start.repaired_s

    def doomed(self, set_id: str) -> bool:
        """Tells whether a set must be released: asked for, or granted and nobody knows whether that was used."""
        turn, state = self.start.turns[self.set_ids.index(set_id)], self.states.get(set_id)
        if turn.late:
            return False
        if self.start.successor is Successor.NEW or state is None:
            return turn.marked
        wanted = turn.release_wanted or turn.belief is Belief.FENCED_GRANTED
        foreign = self.start.successor is not Successor.SAME
        return state in (State.CLAIMED, State.RELEASING) or wanted or (turn.marked and foreign)

    def free_count(self) -> int:
        """Returns the engine's blocks that are neither running nor retained."""
        engine = self.world.engine
        return max(0, BLOCK_COUNT - self.start.running_count - len(engine.blocks_of(engine.leases)))

    # --- how it came about

    def _begin(self) -> None:
        world, lease = self.world, self.start.lease
        if lease is Lease.NEVER_HELD:
            self.believer.reachable = False
        world.passes(1.0)
        if lease is Lease.EXPIRED:
            self.believer.reachable = False
            world.passes(12.0)
        if self.start.restarted:
            world.engine.finish_turn("set-of-old", list(range(131)), "key-0", world.engine.clock.at(1e6), world.now)
            world.passes(1.0)
            world.restart_engine(noticed=self.start.noticed)
            world.passes(2 * RECONNECT_S)
        world.cut()
        world.engine.caching = True

    def _fill_engine(self) -> dict[str, BlockSet]:
        engine, shown = self.world.engine, self.world.engine.clock.at(self.world.now)
        for set_id, turn in zip(self.set_ids, self.start.turns, strict=True):
            if not turn.late:
                self._finish(set_id, turn)
        for at, left_s in enumerate(self.start.foreign_left_s):
            self.foreign[f"foreign-{at}"] = shown + left_s
            engine.retain_foreign(f"foreign-{at}", shown + left_s)
        messages = engine.ledger.connect()
        engine.ledger.disconnect()
        sets = [message.set for message in messages if isinstance(message, wire.Retained)]
        return {report.set_id: convert.block_set(report) for report in sets}

    def _finish(self, set_id: str, turn: Turn) -> None:
        world = self.world
        deadline = world.engine.clock.at(world.now) + turn.left_s
        world.engine.finish_turn(set_id, turn.tokens, f"key-{turn.conversation}", deadline, world.now)

    def _tell(self, reports: dict[str, BlockSet]) -> None:
        """Makes the table believe what it is to believe."""
        world, start = self.world, self.start
        world.notifications_lost, world.notification_delay_s = start.notifications
        engine_id, before = world.engine.engine_id, "session-of-old"
        self._hear(ev.EngineConnected(_MADE_UP, world.link.facts(world.now), before))
        shown = world.engine.clock.at(world.now)
        self._hear(ev.ClockObserved(_MADE_UP, engine_id, world.now - 0.01, shown, world.now))
        believed = [turn for turn in zip(self.set_ids, start.turns, strict=True) if turn[0] in reports]
        for replayed in (True, False):
            for set_id, turn in believed:
                fenced = turn.belief in _FENCED
                if turn.belief is Belief.NOTHING or fenced is not replayed:
                    continue
                granted = turn.belief in (Belief.ADOPTED, Belief.FENCED_GRANTED)
                deadline = shown + turn.believed_left_s
                self._hear(ev.Reported(_MADE_UP, engine_id, reports[set_id], deadline, granted, replayed))
            if replayed:
                self._hear(ev.ReplayFinished(_MADE_UP, engine_id))
        self._ask(believed)
        if start.ticked:
            world.now += 0.5
            world.settle()
        sets = self.believer.owner.sets(world.now)
        self.states = {one.name.set_id: one.state for one in sets if one.name.engine_id == engine_id}
        world.notifications_lost, world.notification_delay_s = False, 0.0

    def _ask(self, believed: list[tuple[str, Turn]]) -> None:
        """Claims, releases and renews what the table believes in."""
        world, owner = self.world, self.believer.owner
        for set_id, turn in believed:
            if turn.belief is Belief.CLAIMED:
                request = ClaimRequest(f"claim-{set_id}", set_id, world.engine.engine_id, SCOPE, WEIGHTS)
                outcome, effects = owner.claim(request, world.now)
                self.believer.perform(effects, world.now)
                if isinstance(outcome, Grant) and owner.confirm(request, world.now) is None:
                    self._given(outcome, self.believer, noted=self._marked(turn))
            if turn.release_wanted and turn.belief is not Belief.NOTHING:
                self.believer.perform(owner.release([set_id], world.now)[1], world.now)
        _, _, effects = owner.renew([set_id for set_id, _ in believed])
        self.believer.perform(effects, world.now)

    def _free_what_is_gone(self) -> None:
        engine = self.world.engine
        gone = [set_id for set_id, turn in zip(self.set_ids, self.start.turns, strict=True) if turn.gone]
        engine.free([set_id for set_id in gone if set_id in engine.labelled])
        for set_id, turn in zip(self.set_ids, self.start.turns, strict=True):
            engine.ledger.mark(set_id, claimed=self._marked(turn))

    def _marked(self, turn: Turn) -> bool:
        if self.start.successor is Successor.SAME and turn.belief in _FENCED:
            # Nobody has granted it since the agent was told.
            return turn.belief is Belief.FENCED_GRANTED
        return turn.marked

    def _claim_elsewhere(self, reports: dict[str, BlockSet]) -> None:
        """Lets routers have claims of an agent that was there before, on what no table here may give or free."""
        engine, same = self.world.engine, self.start.successor is Successor.SAME
        shown = engine.clock.at(self.world.now)
        granted = {given.set_id for given in self.world.truth.given}
        for set_id, turn in zip(self.set_ids, self.start.turns, strict=True):
            state = self.states.get(set_id)
            if turn.claim_left_s is None or set_id not in engine.labelled or set_id in granted:
                continue
            adopted = state is State.CLAIMED or (state is None and turn.marked)
            if state is State.RELEASING or (same and state is not State.FENCED and not adopted):
                continue
            deadline = min(shown + turn.claim_left_s, engine.leases[set_id] - LIMITS.margin_s)
            name = SetName(engine.engine_id, set_id)
            self._given(Grant(name, reports[set_id], deadline, 1.0), self.world.agents[1], noted=self._marked(turn))

    def _given(self, grant: Grant, agent: AgentProcess, *, noted: bool) -> None:
        given = Given(grant, f"claim-{grant.name.set_id}", agent, sent=True, noted=noted)
        self.world.truth.given.append(given)

    def _end_connection(self) -> None:
        world, start = self.world, self.start
        if start.noticed:
            self._hear(ev.ConnectorLost(_MADE_UP, world.engine.engine_id))
        if start.successor is Successor.NEW:
            world.crash(self.believer)
        if start.successor is Successor.SAME_AFTER_ANOTHER:
            world.link.connect(world.agents[1], world.now)
            world.link.pump(world.now)
            world.link.cut(world.now)
        if start.lease is Lease.LOST:
            if world.etcd.state.holder is not None:
                world.etcd.end_lease(world.etcd.state.holder[1])
            self.believer.lose_lease(world.now)

    def _connect(self) -> None:
        world, start = self.world, self.start
        if start.replayed is not None:
            world.link.connect(world.listener, world.now)
            world.link.pump(world.now, start.replayed)
        for set_id, turn in zip(self.set_ids, start.turns, strict=True):
            if turn.late:
                self._finish(set_id, turn)
        if start.broken:
            world.cut()

    def _fill_index(self) -> None:
        etcd, start, now = self.world.etcd, self.start, self.world.now
        unkept = etcd.grant(now)
        own = etcd.state.holder[1] if etcd.state.holder is not None else 0
        leases = [unkept]
        if start.restored:
            self.world.etcd_is_certain = False
            etcd.state.pointers.clear()
            etcd.state.marks = dict.fromkeys(etcd.state.leases, -1)
            leases = [lease_id for lease_id in etcd.state.leases if lease_id != own]
            if start.holder:
                etcd.state.holder = ("session-of-old", etcd.grant(now))
        for found in start.found:
            known = self.set_ids if start.restored else []
            set_id = [*known, "set-of-nobody"][found.turn % (len(known) + 1)]
            engine_id = self.world.engine.engine_id if found.incarnation == 0 else "engine-of-nobody"
            pointer = Pointer(f"key-{found.conversation}", set_id, engine_id)
            etcd.state.pointers[pointer] = leases[found.lease % len(leases)]

    def _hear(self, event: ev.Event) -> None:
        self.believer.hear(event, self.world.now)
