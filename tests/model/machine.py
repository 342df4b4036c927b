"""What can happen to claims, as a hypothesis state machine.

The faults that may happen at all are drawn at the start of each history: some crash agents all the time, some never.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.granting import ClaimRequest, Refusal
from tests.model.agent import AgentProcess
from tests.model.engine import SCOPE, WEIGHTS
from tests.model.etcd import Pointer
from tests.model.prefill import Pace
from tests.model.truth import Given
from tests.model.world import World

FAULTS = (
    "agents crash",
    "agents freeze",
    "agents are cut off",
    "answers are lost",
    "connections break",
    "connectors stall",
    "clocks jump",
    "engines restart",
    "etcd goes back",
    "handles come twice",
    "notes are lost",
    "notifications are lost",
    "operators interfere",
    "reads are slow",
    "routers are stale",
)
_LOST_NOTES_EXCLUDE = {"reads are slow", "connectors stall", "clocks jump"}
"""A note that was written is read before a connection ends (backhaul_connector.link, `_read_rest`). The fence must hold
even without that, but not against everything at once: a read that outlasts its deadline notifies late."""

_MAX_RETAINED = 5
_COUNTS = st.sampled_from([70, 130, 200])
_MAX_REMEMBERED = 20

index = st.integers(0, 11)
slots = st.sampled_from([0, 0, 0, 1])
fates = st.sampled_from(
    (
        *("answered",) * 6,
        "asked again",
        "lost",
        "returned first",
        "agent freezes",
        "agent crashes",
        "note lost",
        "other scope",
    )
)
_FATE_NEEDS = {
    "lost": "answers are lost",
    "returned first": "answers are lost",
    "agent freezes": "agents freeze",
    "agent crashes": "agents crash",
    "note lost": "notes are lost",
}
prompts = st.sampled_from(("continued", "continued", "continued", "edited", "cut", "another"))
paces = st.builds(
    Pace,
    wait_s=st.sampled_from([0.0, 0.0, 0.0, 3.0, 23.0]),
    block_s=st.sampled_from([0.01, 0.01, 0.5, 4.0, 9.0]),
    whole_hit=st.sampled_from([False, False, False, True]),
)


def in_case(fault: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets a rule happen only in histories with a fault."""
    return precondition(lambda machine: fault in machine.faults)


class ClaimsMachine(RuleBasedStateMachine):
    """Rules are what can happen; `tests.model.truth` judges."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: frozenset[str] = frozenset()
        self.remembered: list[Pointer] = []
        """Pointers that routers have found, however long ago."""

    @initialize(
        faults=st.frozensets(st.sampled_from(FAULTS), max_size=6),
        rates=st.lists(st.sampled_from([1 - 200e-6, 1.0, 1 + 200e-6]), min_size=3, max_size=3),
    )
    def the_world_begins(self, faults: frozenset[str], rates: list[float]) -> None:
        self.faults = faults - _LOST_NOTES_EXCLUDE if "notes are lost" in faults else faults
        self.world = World(rates)
        self.world.passes(2.0)
        self.a_turn_ends(0, 300.0, 130)
        self.a_turn_ends(1, 20.0, 200)
        self.world.passes(32.0 if not faults else 0.1)

    # --- what happens anyway

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 6.0, 12.0, 33.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.passes(seconds)

    @rule(conversation=st.integers(0, 2), ttl_s=st.sampled_from([9.0, 20.0, 45.0, 300.0]), count=_COUNTS)
    def a_turn_ends(self, conversation: int, ttl_s: float, count: int) -> None:
        world = self.world
        if len(world.engine.labelled) < _MAX_RETAINED:
            tokens = [conversation * 1000 + at for at in range(count)]
            deadline = world.engine.clock.at(world.now) + ttl_s
            world.engine.finish_turn(f"set-{next(world.ids)}", tokens, f"key-{conversation}", deadline)
            world.engine.retain_foreign(f"foreign-{next(world.ids)}", deadline)
            world.link.pump(world.now)

    @rule(index=index, slot=slots, prompt=prompts, pace=paces)
    def a_turn_comes_back(self, index: int, slot: int, prompt: str, pace: Pace) -> None:
        given = self.claimed(index, 0, "answered", 0.0)
        if given is not None:
            self.sent(given, slot, prompt, pace, twice=False)
            self.world.passes(0.1)

    @rule(index=index, slot=slots, fate=fates, frozen_s=st.sampled_from([0.5, 9.0, 12.0, 34.0]))
    def a_router_claims(self, index: int, slot: int, fate: str, frozen_s: float) -> None:
        self.claimed(index, slot, fate, frozen_s)

    @rule(index=index, slot=slots, prompt=prompts, pace=paces, twice=st.booleans())
    def a_router_sends(self, index: int, slot: int, prompt: str, pace: Pace, twice: bool) -> None:
        unsent = [given for given in self.world.truth.given if given.usable and not given.sent]
        if unsent:
            self.sent(unsent[index % len(unsent)], slot, prompt, pace, twice)

    @rule(index=index)
    def a_router_returns(self, index: int) -> None:
        unsent = [given for given in self.world.truth.given if given.usable and not given.sent]
        if unsent:
            self.world.give_back(unsent[index % len(unsent)])

    @rule(index=index)
    def the_agent_renews(self, index: int) -> None:
        owner, leases = self.agent(0).owner, list(self.world.engine.leases)
        if leases:
            _, _, effects = owner.renew([leases[index % len(leases)]])
            self.agent(0).perform(effects, self.world.now)

    @rule()
    def everything_calms_down(self) -> None:
        self.world.calm_down()

    # --- what fails

    @in_case("agents crash")
    @rule(slot=slots)
    def an_agent_restarts(self, slot: int) -> None:
        self.world.crash(self.agent(slot))

    @in_case("agents crash")
    @rule()
    def another_agent_comes_up(self) -> None:
        agent = self.agent(1)
        agent.reachable = True
        self.world.connect(agent)

    @in_case("agents freeze")
    @rule(slot=slots, seconds=st.sampled_from([1.0, 9.0, 12.0, 40.0]))
    def an_agent_freezes(self, slot: int, seconds: float) -> None:
        self.world.freeze(self.agent(slot), seconds)

    @in_case("agents are cut off")
    @rule(slot=slots)
    def an_agent_is_cut_off_or_back(self, slot: int) -> None:
        agent = self.agent(slot)
        agent.reachable = not agent.reachable

    @in_case("connections break")
    @rule(noticed=st.booleans(), slot=slots, replayed=st.sampled_from([0, 1, 2, 10]))
    def the_connection_breaks(self, noticed: bool, slot: int, replayed: int) -> None:
        """It comes up again at some agent, and may break again in the middle of the replay."""
        world = self.world
        agent = self.agent(slot)
        world.cut(noticed=noticed)
        world.connect(agent)
        world.link.pump(world.now, replayed)
        if replayed < 10:
            world.cut(noticed=noticed)

    @in_case("connectors stall")
    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def the_connector_stalls(self, seconds: float) -> None:
        self.world.link.stalled_until = self.world.now + seconds

    @in_case("clocks jump")
    @rule(seconds=st.sampled_from([-3600.0, -20.0, 20.0, 3600.0]))
    def the_clock_jumps(self, seconds: float) -> None:
        self.world.jump(seconds)

    @in_case("engines restart")
    @rule(noticed=st.booleans())
    def the_decode_engine_restarts(self, noticed: bool) -> None:
        self.world.restart_engine(noticed=noticed)

    @in_case("engines restart")
    @rule(slot=slots)
    def a_prefill_engine_restarts(self, slot: int) -> None:
        self.world.prefills[slot] = self.world.new_prefill(slot)

    @in_case("etcd goes back")
    @rule(steps=st.sampled_from([2, 5, 15, 40]))
    def etcd_goes_back(self, steps: int) -> None:
        self.world.etcd.go_back(steps, self.world.now)

    @in_case("etcd goes back")
    @rule()
    def etcd_loses_the_nodes_lease(self) -> None:
        holder = self.world.etcd.state.holder
        if holder is not None:
            self.world.etcd.end_lease(holder[1])

    @in_case("notifications are lost")
    @rule(lost=st.booleans(), delay_s=st.sampled_from([0.0, 1.5]))
    def the_network_to_the_engine_changes(self, lost: bool, delay_s: float) -> None:
        self.world.notifications_lost, self.world.notification_delay_s = lost, delay_s

    @in_case("operators interfere")
    @rule(slot=slots, index=index)
    def an_operator_releases(self, slot: int, index: int) -> None:
        agent, leases = self.agent(slot), list(self.world.engine.leases)
        if leases and not agent.frozen:
            _, effects = agent.owner.release([leases[index % len(leases)]], self.world.now)
            agent.perform(effects, self.world.now)

    @in_case("operators interfere")
    @rule(slot=slots)
    def an_operator_drains(self, slot: int) -> None:
        agent = self.agent(slot)
        agent.drained = True
        agent.hear(ev.DrainAsked(), self.world.now)

    # --- what routers do

    def claimed(self, index: int, slot: int, fate: str, frozen_s: float) -> Given | None:
        """Claims what some pointer leads to; returns the grant that a router holds afterwards."""
        world, agent = self.world, self.agent(slot)
        pointer = self.found(index)
        if pointer is None or agent.frozen:
            return None
        if _FATE_NEEDS.get(fate, fate) not in self.faults and fate in _FATE_NEEDS:
            fate = "answered"
        scope = "scope-2" if fate == "other scope" else SCOPE
        request = ClaimRequest(f"request-{next(world.ids)}", pointer.set_id, pointer.engine_id, scope, WEIGHTS)
        if fate == "returned first":
            agent.perform(agent.owner.give_back(request.request_id, world.now), world.now)
        world.lose_note = fate == "note lost"
        frozen_s = frozen_s if fate == "agent freezes" else 0.0
        outcome = world.claim(agent, request, frozen_s=frozen_s)
        world.lose_note = False
        if isinstance(outcome, Refusal):
            return None
        assert fate not in ("returned first", "other scope"), "granted although it must not be"
        given = world.truth.granted(agent, outcome, request.request_id, world.now, at_once=not frozen_s)
        return self.answered(agent, request, given, fate)

    def answered(self, agent: AgentProcess, request: ClaimRequest, given: Given, fate: str) -> Given | None:
        """Lets an answer arrive, or not."""
        world = self.world
        if fate == "asked again":
            again = world.claim(agent, request)
            assert isinstance(again, Refusal) or again.deadline == given.grant.deadline
        if fate == "agent crashes":
            world.crash(agent)
        if fate == "lost":
            world.give_back(given)
            return None
        return given

    def found(self, index: int) -> Pointer | None:
        """Returns a pointer that a router has found, just now or long ago."""
        now = list(self.world.etcd.state.pointers)
        self.remembered = [*self.remembered, *(one for one in now if one not in self.remembered)][-_MAX_REMEMBERED:]
        pointers = self.remembered if "routers are stale" in self.faults else now
        return pointers[index % len(pointers)] if pointers else None

    def sent(self, given: Given, slot: int, prompt: str, pace: Pace, twice: bool) -> None:
        """Sends a handle, or sends it twice."""
        world = self.world
        if "reads are slow" not in self.faults:
            pace = replace(pace, block_s=0.01)
        tokens = prompt_of(world.engine.turns.get(given.set_id, []), prompt)
        world.send(given, slot, tokens, pace)
        if twice and "handles come twice" in self.faults:
            world.send(given, slot, tokens, pace)

    def agent(self, slot: int) -> AgentProcess:
        """Returns the agent that the connector is, or will be, connected to (0), or the other one (1)."""
        here = self.world.agents.index(self.world.link.agent or self.world.listener)
        return self.world.agents[here ^ slot]

    # --- what holds

    @invariant()
    def owners_know_nothing_that_was_not_reported(self) -> None:
        if hasattr(self, "world"):
            self.world.judge_owners()

    def teardown(self) -> None:
        if hasattr(self, "world") and sys.exc_info()[0] is None:
            self.world.calm_down()


def prompt_of(tokens: list[int], kind: str) -> list[int]:
    """Returns the prompt that comes for a turn of `tokens`."""
    match kind:
        case "continued":
            return [*tokens, 7, 8, 9]
        case "edited":
            return [*tokens[:100], 5, *tokens[101:], 7]
        case "cut":
            return tokens[:100]
        case _:
            return [token + 1 for token in tokens]
