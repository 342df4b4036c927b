"""One decode engine, the agents beside it, two prefill engines, and what the registry keeps; and how time passes there.

What routers do is in `machine`: they have no memory that matters.
"""

import itertools
import json
from collections.abc import Sequence

from backhaul_node_agent import convert
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.granting import ClaimRequest, Refusal
from backhaul_node_agent.core.life import State
from tests.model.agent import AgentProcess, note_of
from tests.model.clocks import Clock, RemoteClocks
from tests.model.engine import BLOCK_COUNT, DecodeEngine
from tests.model.etcd import Etcd, pointers_of
from tests.model.link import Link
from tests.model.prefill import Pace, PrefillEngine, Read
from tests.model.truth import Given, Truth

RECONNECT_S = 1.0
SILENCE_S = 10.0
CALM_S = 90.0
"""Within this time everything that is settled by itself has been: a lease ends (10 s), its successor joins and waits
for the fence (32 s), or claims lapse (32 s) and their sets are released, again after 3 s where that went astray."""
RELEASED_S = 5.0
"""Within this time a release is done, sent again after 3 s where it went astray."""
_STEP_S = 1.0
_MIN_STEP_S = 0.05


class World:
    """The world's memory. Methods are what can happen in it; each keeps to what the real parts can do."""

    def __init__(self, rates: Sequence[float], *, retaining: bool) -> None:
        """`rates` are those of the decode engine's clock and of the two prefill engines'.

        `retaining`: whether agents renew and make room by themselves. Where they do, deadlines are seldom near.
        """
        self.retaining = retaining
        self.now = 100.0
        self.ids = itertools.count(1)
        self.etcd = Etcd()
        self.agents = [self.new_agent(), self.new_agent()]
        self.agents[1].reachable = False
        self.listener = self.agents[0]
        """Who has the socket's path: the connector connects to it."""
        self.notes_vanish = False
        """Whether what agents write to connectors gets lost, and they don't know."""
        self.etcd_is_certain = True
        """Whether what was written to etcd stays."""
        self._rates = rates
        self._clocks: dict[str, Clock] = {}
        self._numbers = itertools.count(1)
        self._notifications: list[tuple[float, ev.SendRelease | ev.SendRenewal]] = []
        self.notification_delay_s = 0.0
        self.notifications_lost = False
        self._connect_at = 0.0
        self.prefills = [self.new_prefill(0), self.new_prefill(1)]
        self.start_engine()

    # --- processes

    def new_agent(self) -> AgentProcess:
        """Returns a process that has just started."""
        return AgentProcess(f"session-{next(self.ids)}", self.etcd, self._perform, retaining=self.retaining)

    def new_prefill(self, slot: int) -> PrefillEngine:
        """Returns an engine that has just started."""
        clock = Clock(3000.0 * next(self.ids), self._rates[1 + slot])
        return PrefillEngine(
            clock,
            RemoteClocks(clock, self._clocks),
            engine=lambda: self.engine,
            started=lambda read: self.truth.started(read, self.now),
            used=self._judge_used,
        )

    def start_engine(self) -> None:
        """Starts an incarnation of the decode engine."""
        engine_id = f"engine-{next(self.ids)}"
        clock = self._clocks[engine_id] = Clock(50_000.0 * next(self.ids), self._rates[0])
        self.engine = DecodeEngine(engine_id, clock)
        self.truth = Truth(self.engine)
        self.link = Link(self.engine, self._numbers)
        self._notifications.clear()

    def restart_engine(self, *, noticed: bool) -> None:
        """Kills the decode engine and starts it anew."""
        self.cut(noticed=noticed)
        del self._clocks[self.engine.engine_id]
        self.start_engine()

    def freeze(self, agent: AgentProcess, seconds: float) -> None:
        """Stops an agent for a while; the connector gives up on it after a silence."""
        agent.frozen = True
        self.passes(min(seconds, SILENCE_S))
        if seconds > SILENCE_S and self.link.agent is agent:
            self.cut(noticed=False)
        self.passes(max(0.0, seconds - SILENCE_S))
        agent.frozen = False

    def crash(self, agent: AgentProcess) -> None:
        """Kills an agent; another one starts in its place and takes the socket's path."""
        if self.link.agent is agent:
            self.cut(noticed=False)
        self.agents[self.agents.index(agent)] = self.listener = self.new_agent()

    def cut(self, *, noticed: bool = True) -> None:
        """Breaks the connection between connector and agent."""
        self.link.cut(self.now, noticed=noticed)
        self._connect_at = self.now + RECONNECT_S

    def connect(self, agent: AgentProcess) -> None:
        """Lets the connector connect to an agent."""
        self.cut()
        self.listener = agent
        self.link.connect(agent, self.now)

    def jump(self, seconds: float) -> None:
        """Lets the decode engine's clock jump ahead; everybody measures it before a router goes on with what it has."""
        self._clocks[self.engine.engine_id].epoch += seconds
        for given in self.truth.given:
            given.usable = False
        for prefill in self.prefills:
            prefill.clocks.measure(self.engine.engine_id)
        self.engine.step(self.now)
        self.link.stalled_until = 0.0
        self.link.ping(self.now)

    def _judge_used(self, read: Read) -> None:
        # A read that was held back may outlive its engine; what it copied was there before.
        if read.engine_id == self.engine.engine_id:
            self.truth.used(read, self.now)

    # --- time

    def passes(self, seconds: float) -> None:
        """Lets time pass."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + max(_MIN_STEP_S, min(_STEP_S, seconds / 4)))
            self.settle()

    def settle(self) -> None:
        """Lets everything happen that is due."""
        self.engine.step(self.now)
        for prefill in self.prefills:
            prefill.step(self.now)
        self._deliver()
        self.etcd.step(self.now)
        self._tend_link()
        for agent in self.agents:
            agent.step(self.now)

    def _tend_link(self) -> None:
        agent = self.link.agent
        if agent is not None and agent.taken:
            # Another session holds the node: the agent sends its connectors there.
            agent.taken = False
            self.cut()
        if self.link.agent is None and self.now >= self._connect_at and not self.listener.frozen:
            self.link.connect(self.listener, self.now)
        self.link.ping(self.now)
        self.link.pump(self.now)

    def _deliver(self) -> None:
        due = [effect for at, effect in self._notifications if at <= self.now]
        self._notifications = [(at, effect) for at, effect in self._notifications if at > self.now]
        for effect in due:
            if isinstance(effect, ev.SendRelease):
                self.engine.free([effect.set_id])
            else:
                self.engine.renew(effect.set_ids, self.now)

    def _perform(self, agent: AgentProcess, effect: ev.Effect) -> None:
        match effect:
            case ev.TellClaimed() | ev.TellReturned():
                if self.reaches(agent, effect.engine_id):
                    self.link.tell(note_of(effect))
            case ev.SendRelease() if effect.engine_id == self.engine.engine_id:
                self.truth.released(effect.set_id, self.now)
                if self.etcd_is_certain and agent.reachable:
                    found = {pointer.set_id for pointer in self.etcd.state.pointers}
                    assert effect.set_id not in found, "released before its pointer was gone"
                self._notify(effect)
            case ev.SendRenewal() if effect.engine_id == self.engine.engine_id:
                for set_id in effect.set_ids:
                    self.truth.addressed(set_id)
                self._notify(effect)
            case ev.Decided(reason=ev.Reason.SUPERSEDED) if effect.engine_id == self.engine.engine_id:
                self.truth.superseded(effect.set_id)
            case ev.Decided(reason=ev.Reason.RENEWED) if effect.engine_id == self.engine.engine_id:
                self.truth.renewed(effect.set_id, self.now)
            case _:
                pass

    def _notify(self, effect: ev.SendRelease | ev.SendRenewal) -> None:
        if not self.notifications_lost:
            self._notifications.append((self.now + self.notification_delay_s, effect))

    def reaches(self, agent: AgentProcess, engine_id: str) -> bool:
        """Tells whether what an agent writes to an engine's connector arrives."""
        return not self.notes_vanish and self.link.agent is agent and engine_id == self.engine.engine_id

    def _writes(self, agent: AgentProcess, engine_id: str) -> bool:
        """Tells whether an agent can write to an engine's connector, whatever becomes of it."""
        if self.notes_vanish:
            return engine_id == self.engine.engine_id and agent.owner.connected(engine_id)
        return self.reaches(agent, engine_id)

    # --- routers

    def claim(
        self, agent: AgentProcess, request: ClaimRequest, *, frozen_s: float = 0.0, broken: bool = False
    ) -> Given | Refusal:
        """Asks an agent for a set (`Agent.claim`).

        It may freeze between granting and answering, or find that the connection is `broken`.
        """
        outcome, effects = agent.owner.claim(request, self.now)
        noted = self.reaches(agent, request.engine_id)
        agent.perform(effects, self.now)
        if isinstance(outcome, Refusal):
            assert not effects, "a refusal changes something"
            return outcome
        if frozen_s:
            self.freeze(agent, frozen_s)
        if broken:
            self.cut()
        if self._writes(agent, request.engine_id):
            refusal = agent.owner.confirm(request, self.now)
        else:
            refusal = Refusal("CONNECTOR_AWAY", "the note could not be written")
        if refusal is not None:
            agent.perform(agent.owner.abandon(request.request_id, self.now), self.now)
            return refusal
        return self._given(Given(outcome, request.request_id, agent, noted=noted), at_once=not frozen_s)

    def _given(self, given: Given, *, at_once: bool) -> Given:
        if self.etcd_is_certain:
            session, _ = self.etcd.state.holder or ("", 0)
            assert session == given.agent.session, "granted by an agent that is not the owner"
        known = [one for one in self.truth.given if one.request_id == given.request_id]
        if known:
            assert known[0].grant.deadline == given.grant.deadline, "the same claim got another deadline"
            return known[0]
        self.truth.granted(given, self.now, at_once=at_once)
        return given

    def give_back(self, given: Given) -> None:
        """Returns a claim to the agent that granted it, if that is still there."""
        given.usable = False
        if given.agent in self.agents and not given.agent.frozen:
            given.agent.perform(given.agent.owner.give_back(given.request_id, self.now), self.now)

    def send(self, given: Given, slot: int, prompt: list[int], identity: bytes, pace: Pace) -> None:
        """Sends a handle to a prefill engine; its router returns the claim when that says that it is not spent."""
        given.sent = True
        params = json.loads(convert.handle(given.grant))
        answer = self.prefills[slot].admit(params, prompt, identity, pace, self.now)
        if not answer.spent:
            self.give_back(given)

    # --- what holds

    def judge_owners(self) -> None:
        """No owner knows a set of this incarnation that was never reported."""
        for agent in self.agents:
            known = {
                one.name.set_id for one in agent.owner.sets(self.now) if one.name.engine_id == self.engine.engine_id
            }
            assert known <= self.engine.turns.keys(), "an owner knows a foreign id"

    def calm_down(self) -> None:
        """Mends everything and lets it settle; judges what is left."""
        self.notes_vanish = self.notifications_lost = False
        self.notification_delay_s = 0.0
        for slot, agent in enumerate(self.agents):
            agent.reachable, agent.frozen = True, False
            if agent is not self.listener:
                # One agent is meant to be here; another one would wait for the node for ever.
                if self.link.agent is agent:
                    self.cut()
                self.agents[slot] = self.new_agent()
                self.agents[slot].reachable = False
        self.link.stalled_until = 0.0
        self.engine.free_count = BLOCK_COUNT
        for given in self.truth.given:
            # Routers have gone: what they have not sent is never sent.
            given.usable = given.usable and given.sent
        self.passes(CALM_S)
        owner = self.listener.owner
        assert owner.connected(self.engine.engine_id), "the connector found no agent"
        # What has been kept long enough is released at any time, so also now.
        unsettled = self._unsettled()
        self.passes(RELEASED_S)
        for name, state in self._unsettled().items():
            assert name not in unsettled, f"{name} is {state.name} for ever"
        for _ in range(owner.set_count):
            self.passes(RELEASED_S if self._unsettled() else 0.0)
        assert not self._unsettled(), "sets are released without end"
        self.judge_agreement()

    def judge_agreement(self) -> None:
        """The owner's table is what the engine retains of labelled turns, and the index is that table."""
        owner = self.listener.owner
        held: dict[str, BlockSet] = {one.name.set_id: one.block_set for one in owner.sets(self.now)}
        assert held.keys() == self.engine.labelled, "the owner's table is not what the engine retains"
        pointers = {pointer for one in held.values() for pointer in pointers_of(one, self.engine.engine_id)}
        assert self.etcd.state.pointers.keys() == pointers, "the index is not the owner's table"

    def _unsettled(self) -> dict[str, State]:
        return {one.name.set_id: one.state for one in self.listener.owner.sets(self.now) if one.state is not State.HELD}
