"""Random histories of one engine, its connector, two agents, and routers, against a model of who may read.

The model knows what no agent knows: the engine's true clock, who really holds the lease, and to whom the connector
really is connected. It keeps every grant that a router was given, and checks each new grant and release against them.
"""

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.granting import ClaimRequest, Grant, Refusal
from backhaul_node_agent.core.life import Limits
from backhaul_node_agent.core.owner import Owner
from tests.unit.node_agent.owned import block_set, facts

LIMITS = Limits(claim_ttl_s=30.0, margin_s=2.0)
LEASE_TTL_S = 10.0
LEASE_MARGIN_S = 0.5
RATE = 1 + 100e-6
"""The engine's clock runs ahead."""
SETS = ("set-0", "set-1")
BREAKS = ("connection", "agent", "lease", "registry", "index")
# What goes well is likelier than what does not, or hardly a set would ever be granted.
rarely = st.sampled_from([False, False, False, True])
slots = st.sampled_from([0, 0, 0, 1])
names = st.sampled_from(SETS)


@dataclass
class Agent:
    """One agent process, and what it has not noticed yet."""

    session: str
    owner: Owner
    connection: int | None = None
    """The connection that it believes to have."""
    acknowledging: bool = True
    unpublished: list[str] = field(default_factory=list)


@dataclass
class Retained:
    """What the connector records of a set."""

    deadline: float
    claimed: bool = False


@dataclass
class Given:
    """A grant that a router was given."""

    set_id: str
    request_id: str
    session: str
    deadline: float
    noted: bool
    """Whether the connector got to know of it."""
    returned: bool = False
    over: bool = False
    """The set was freed since; its id may come again in this model."""


class OwnerMachine(RuleBasedStateMachine):
    """Rules are what can happen; checks are where grants and releases appear."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ids = itertools.count(1)
        self.agents = [self.new_agent(), self.new_agent()]
        self.ledger: dict[str, Retained] = {}
        self.connected: int | None = None
        self.connection = 0
        self.last_session = ""
        self.lease_holder: str | None = None
        self.lease_until = 0.0
        self.partitioned = False
        self.given: list[Given] = []

    # --- the world

    @property
    def engine_now(self) -> float:
        return 5000.0 + self.now * RATE

    def new_agent(self) -> Agent:
        session = f"session-{next(self.ids)}"
        return Agent(session, Owner(session=session, limits=LIMITS))

    def hear(self, agent: Agent, event: ev.Event) -> None:
        self.perform(agent, agent.owner.handle(event, self.now))

    def perform(self, agent: Agent, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.SendRelease():
                    self.check_release(effect.set_id)
                case ev.TellClaimed():
                    self.note(agent, effect.set_id, True)
                case ev.TellReturned():
                    self.note(agent, effect.set_id, False)
                case ev.Unpublish():
                    agent.unpublished.append(effect.block_set.set_id)
                case _:
                    pass

    def note(self, agent: Agent, set_id: str, claimed: bool) -> None:
        if self.reaches(agent) and set_id in self.ledger:
            self.ledger[set_id].claimed = claimed
            for given in self.live_grants(set_id):
                given.noted |= claimed

    def pick(self, slot: int) -> Agent:
        """Returns the agent that the connector is connected to (0) or the other one (1)."""
        return self.agents[(self.connected or 0) ^ slot]

    def keep_lease(self) -> None:
        for agent in self.agents:
            if agent.session == self.lease_holder and self.now < self.lease_until and not self.partitioned:
                self.lease_until = self.now + LEASE_TTL_S
                self.hear(agent, ev.LeaseHeld(self.lease_until - LEASE_MARGIN_S, False))

    def reaches(self, agent: Agent) -> bool:
        """Whether what the agent writes arrives."""
        return self.connected is not None and self.agents[self.connected] is agent

    def tell(self, event_of: "type[ev.SetsFreed]", set_ids: list[str]) -> None:
        if self.connected is not None:
            self.hear(self.agents[self.connected], event_of(self.connection, "engine-1", set_ids))

    # --- checks

    def live_grants(self, set_id: str) -> list[Given]:
        return [given for given in self.given if given.set_id == set_id and not given.returned and not given.over]

    def check_grant(self, agent: Agent, grant: Grant) -> None:
        set_id = grant.name.set_id
        assert set_id in self.ledger, "granted although freed"
        for given in self.live_grants(set_id):
            # Nobody knows of a grant whose note was lost with its agent: the fence alone keeps it apart from the next.
            assert not given.noted, "granted twice"
            assert given.session != agent.session, "granted twice by the same agent"
            assert self.engine_now >= given.deadline, "granted while a read may be under way"
        assert grant.deadline <= self.ledger[set_id].deadline - LIMITS.margin_s, "granted past the engine's deadline"
        assert grant.deadline <= self.engine_now + LIMITS.claim_ttl_s, "granted for longer than the fence waits"
        assert grant.deadline - self.engine_now >= LIMITS.least_left_s, "granted too late for a read"

    def check_release(self, set_id: str) -> None:
        assert set_id in SETS, "a foreign id was touched"
        for given in self.live_grants(set_id):
            assert self.engine_now >= given.deadline, "released under a read"

    # --- what can happen

    @initialize()
    def all_is_well(self) -> None:
        self.an_agent_joins(0)
        self.the_connector_connects(0, 9, True)
        self.a_turn_ends("set-0", 300.0)
        self.a_turn_ends("set-1", 20.0)

    @rule(seconds=st.sampled_from([0.1, 3.0, 33.0]))
    def time_passes(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            expired = [set_id for set_id, held in self.ledger.items() if self.engine_now >= held.deadline]
            self.free(expired)
            self.keep_lease()
            for agent in self.agents:
                self.hear(agent, ev.TimePassed())
            if self.connected is not None:
                self.ping()

    def free(self, set_ids: list[str]) -> None:
        for set_id in set_ids:
            del self.ledger[set_id]
            for given in self.given:
                given.over |= given.set_id == set_id
        if set_ids:
            self.tell(ev.SetsFreed, [*set_ids, "foreign"])

    def ping(self) -> None:
        assert self.connected is not None
        agent = self.agents[self.connected]
        sent, received = self.now - 0.004, self.now
        engine_now = 5000.0 + (self.now - 0.003) * RATE
        self.hear(agent, ev.ClockObserved(self.connection, "engine-1", sent, engine_now, received))

    @rule(set_id=names, ttl_s=st.sampled_from([9.0, 40.0, 300.0]))
    def a_turn_ends(self, set_id: str, ttl_s: float) -> None:
        if set_id not in self.ledger:
            self.ledger[set_id] = Retained(self.engine_now + ttl_s)
            if self.connected is not None:
                self.report(self.agents[self.connected], set_id, replayed=False)

    def report(self, agent: Agent, set_id: str, *, replayed: bool) -> None:
        held = self.ledger[set_id]
        self.hear(
            agent,
            ev.Reported(
                self.connection, "engine-1", block_set(set_id), held.deadline, granted=held.claimed, replayed=replayed
            ),
        )

    @rule(set_id=names, told=st.booleans())
    def the_engine_renews(self, set_id: str, told: bool) -> None:
        if set_id in self.ledger:
            self.ledger[set_id].deadline = max(self.ledger[set_id].deadline, self.engine_now + 120.0)
            if told and self.connected is not None:
                deadlines = {set_id: self.ledger[set_id].deadline, "foreign": 1e9}
                self.hear(self.agents[self.connected], ev.DeadlinesConfirmed(self.connection, "engine-1", deadlines))

    @rule(slot=slots, set_id=names, lost=rarely)
    def a_router_claims(self, slot: int, set_id: str, lost: bool) -> None:
        agent = self.pick(slot)
        request = ClaimRequest(f"request-{next(self.ids)}", set_id, "engine-1", "scope-1", "weights")
        outcome, effects = agent.owner.claim(request, self.now)
        if isinstance(outcome, Refusal):
            assert not effects
            return
        if not self.reaches(agent) or agent.owner.confirm(request, self.now) is not None:
            self.perform(agent, effects)
            self.perform(agent, agent.owner.abandon(request.request_id, self.now))
            return
        self.check_grant(agent, outcome)
        self.given.append(Given(set_id, request.request_id, agent.session, outcome.deadline, noted=False))
        if lost:
            # Written, but never read: the connection is cut.
            self.connected = None
        self.perform(agent, effects)

    @rule(seconds=st.sampled_from([0.0, 3.0, 33.0]))
    def routers_claim_all(self, seconds: float) -> None:
        for set_id in SETS:
            self.a_router_claims(0, set_id, False)
        self.time_passes(seconds)
        for set_id in SETS:
            self.a_router_claims(0, set_id, False)

    @precondition(lambda self: self.given)
    @rule(slot=slots, data=st.data())
    def a_router_returns(self, slot: int, data: st.DataObject) -> None:
        given = data.draw(st.sampled_from(self.given))
        agent = self.pick(slot)
        if given.over or given.returned:
            return
        if agent.session == given.session:
            # A router returns only what it has not used and will not use.
            given.returned = True
        self.perform(agent, agent.owner.give_back(given.request_id, self.now))

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def a_prefill_engine_reads(self, data: st.DataObject) -> None:
        given = data.draw(st.sampled_from(self.given))
        if not given.returned and not given.over and self.engine_now + 5.0 < given.deadline:
            self.free([given.set_id])

    @rule(slot=slots)
    def an_agent_joins(self, slot: int) -> None:
        agent = self.agents[slot]
        self.partitioned = False
        free = self.lease_holder is None or self.now >= self.lease_until
        if free or self.lease_holder == agent.session:
            joined = self.lease_holder != agent.session or free
            self.lease_holder, self.lease_until = agent.session, self.now + LEASE_TTL_S
            self.hear(agent, ev.LeaseHeld(self.lease_until - LEASE_MARGIN_S, joined))

    @rule(slot=slots, replayed=st.sampled_from([9, 9, 9, 9, 0, 1]), noticed=st.booleans())
    def the_connector_connects(self, slot: int, replayed: int, noticed: bool) -> None:
        self.cut(noticed)
        agent = self.agents[slot]
        self.connected, self.connection = slot, next(self.ids)
        agent.connection = self.connection
        self.hear(agent, ev.EngineConnected(self.connection, facts(), self.last_session))
        self.last_session = agent.session
        self.ping()
        for set_id in list(self.ledger)[:replayed]:
            self.report(agent, set_id, replayed=True)
        if replayed <= len(self.ledger):
            # Cut in the middle of the replay.
            self.cut(True)
        else:
            self.hear(agent, ev.ReplayFinished(self.connection, "engine-1"))
            self.hear(agent, ev.PublisherUp("engine-1"))

    @rule(
        noticed=st.booleans(), slot=slots, what=st.sampled_from(["connection", "agent", "lease", "registry", "index"])
    )
    def something_breaks(self, what: str, slot: int, noticed: bool) -> None:
        match what:
            case "connection":
                self.cut(noticed)
            case "agent":
                self.connected = None if self.connected == slot else self.connected
                self.agents[slot] = self.new_agent()
            case "lease":
                self.forget_lease(noticed)
            case "registry":
                self.partitioned = True
            case "index":
                event = ev.PublisherUp("engine-1") if noticed else ev.PublisherDown("engine-1")
                self.hear(self.agents[slot], event)

    @rule()
    def all_is_mended(self) -> None:
        slot = self.connected or 0
        self.now = max(self.now, self.lease_until)
        self.an_agent_joins(slot)
        self.the_connector_connects(slot, 9, True)

    @rule()
    def the_agent_restarts(self) -> None:
        slot = self.connected or 0
        self.something_breaks("agent", slot, False)
        self.now = max(self.now, self.lease_until)
        self.an_agent_joins(slot)
        self.the_connector_connects(slot, 9, False)

    def cut(self, noticed: bool) -> None:
        if self.connected is not None and noticed:
            self.hear(self.agents[self.connected], ev.ConnectorLost(self.connection, "engine-1"))
        self.connected = None

    def forget_lease(self, noticed: bool) -> None:
        """etcd loses its newest revisions: the holder may not know for a while."""
        for agent in self.agents:
            if noticed and agent.session == self.lease_holder:
                self.hear(agent, ev.LeaseLost())
        self.lease_holder = None

    @rule(slot=slots)
    def the_registry_acknowledges(self, slot: int) -> None:
        agent = self.agents[slot]
        agent.unpublished, removed = [], agent.unpublished
        self.hear(agent, ev.PointersRemoved("engine-1", removed))

    @rule(slot=slots, set_id=st.sampled_from([*SETS, "foreign"]))
    def an_operator_releases(self, slot: int, set_id: str) -> None:
        agent = self.pick(slot)
        _, effects = agent.owner.release([set_id], self.now)
        self.perform(agent, effects)

    @invariant()
    def owners_know_nothing_that_was_not_reported(self) -> None:
        for agent in self.agents:
            assert {held.name.set_id for held in agent.owner.sets(self.now)} <= set(SETS)


OwnerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)
TestOwnerMachine = OwnerMachine.TestCase
