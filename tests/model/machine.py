"""What can happen to claims, as a hypothesis state machine.

The faults that may happen at all are drawn at the start of each history: some crash agents all the time, some never.
"""

import sys
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.granting import ClaimRequest, Refusal
from tests.model.agent import AgentProcess
from tests.model.engine import IDENTITY, SCOPE, WEIGHTS
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
    "memory is short",
    "notes vanish",
    "notifications are lost",
    "operators interfere",
    "reads are slow",
)
_BUNDLES = (
    {"agents crash", "notes vanish"},
    {"agents crash", "operators interfere"},
    {"agents crash", "etcd goes back", "connections break"},
    {"agents crash", "reads are slow"},
    {"agents are cut off", "agents freeze"},
    {"answers are lost", "handles come twice"},
    {"notifications are lost", "operators interfere"},
    {"clocks jump", "reads are slow"},
    {"engines restart", "connections break", "connectors stall"},
)
"""Faults that together are worse than each alone."""
_NOT_WITH_VANISHING_NOTES = {"reads are slow", "connectors stall", "clocks jump", "etcd goes back"}
"""A note that was written is read before the connection ends (backhaul_connector.link, `_read_rest`). The fence must
hold without that, too, but not against everything at once: a read that outlasts its deadline notifies late, say."""

_FATES = {
    "answered": "",
    "asked again": "",
    "other scope": "",
    "returned first": "",
    "lost": "answers are lost",
    "agent freezes": "agents freeze",
    "agent is cut off": "agents are cut off",
    "agent crashes": "agents crash",
    "engine restarts": "engines restart",
    "operator releases": "operators interfere",
    "note vanishes": "notes vanish",
}
"""What may become of a claim, and the fault that it needs."""
_USUAL = ("answered",) * 3
_MAX_RETAINED = 3
_COUNTS = st.sampled_from([71, 131, 201])
_EDITED_AT = 60
_MAX_REMEMBERED = 6
_ANOTHERS = b"another tenant's"

index = st.integers(0, 11)
slots = st.sampled_from([0] * 5 + [1])
chances = st.integers(0, 59)
waits = st.sampled_from([0.0, 0.0, 0.0, 2.5, 9.0, 46.0])
prompts = st.sampled_from(("continued",) * 8 + ("edited", "cut", "another", "another tenant's"))
paces = st.builds(
    Pace,
    wait_s=st.sampled_from([0.0, 0.0, 0.0, 0.0, 3.0, 23.0]),
    block_s=st.sampled_from([0.5, 9.0, 9.0]),
    whole_hit=st.sampled_from([False, False, False, False, False, True]),
)


def in_case(fault: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets a rule happen only in histories with a fault."""
    return precondition(lambda machine: fault in machine.faults)


def _drawn(bundle: AbstractSet[str] | None) -> st.SearchStrategy[AbstractSet[str]]:
    return st.just(bundle) if bundle is not None else st.frozensets(st.sampled_from(FAULTS), max_size=4)


class ClaimsMachine(RuleBasedStateMachine):
    """Rules are what can happen; `tests.model.truth` judges."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: frozenset[str] = frozenset()
        self.fates: list[str] = []
        self.begun = False
        self.step_count = 0
        """Since everything calmed down."""
        self.remembered: list[Pointer] = []
        """Pointers that routers have found, however long ago."""

    @initialize(
        faults=st.sampled_from((*_BUNDLES, None, None, None)).flatmap(_drawn),
        rates=st.lists(st.sampled_from([1 - 200e-6, 1.0, 1 + 200e-6]), min_size=3, max_size=3),
        retaining=st.booleans(),
    )
    def the_world_begins(self, faults: AbstractSet[str], rates: list[float], retaining: bool) -> None:
        self.faults = frozenset(faults - _NOT_WITH_VANISHING_NOTES if "notes vanish" in faults else faults)
        usual = [fate for fate, needed in _FATES.items() if not needed]
        unusual = [fate for fate, needed in _FATES.items() if needed in self.faults]
        self.fates = [*_USUAL, *usual, *unusual * 4]
        self.world = World(rates, retaining=retaining)
        self.world.etcd_is_certain = "etcd goes back" not in self.faults
        self.world.passes(1.0)
        self.begun = True

    # --- what happens anyway

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 6.0, 12.0, 33.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.passes(seconds)

    @rule(
        conversation=st.integers(0, 2),
        ttl_s=st.sampled_from([9.0, 20.0, 45.0, 300.0, 300.0]),
        count=_COUNTS,
        edited=st.sampled_from([False, False, False, True]),
    )
    def a_turn_ends(self, conversation: int, ttl_s: float, count: int, edited: bool = False) -> None:
        world = self.world
        if len(world.engine.labelled) < _MAX_RETAINED:
            tokens = [conversation * 1000 + at + 500 * (edited and at > _EDITED_AT) for at in range(count)]
            deadline = world.engine.clock.at(world.now) + ttl_s
            world.engine.finish_turn(f"set-{next(world.ids)}", tokens, f"key-{conversation}", deadline, world.now)
            world.engine.retain_foreign(f"foreign-{next(world.ids)}", deadline)
            world.link.pump(world.now)

    @rule(index=index, slot=slots, prompt=prompts, pace=paces, chance=chances, wait_s=waits)
    def a_turn_comes_back(self, index: int, slot: int, prompt: str, pace: Pace, chance: int, wait_s: float) -> None:
        given = self.claimed(self.found(index), 0, chance, wait_s)
        if given is not None and given in self.unsent():
            self.sent(given, slot, prompt, pace, twice=True)
            self.world.passes(0.1 + wait_s)

    @rule(index=index, slot=slots, chance=chances, wait_s=waits)
    def a_router_claims(self, index: int, slot: int, chance: int, wait_s: float) -> None:
        self.claimed(self.found(index), slot, chance, wait_s)

    @rule(slot=slots, chance=chances, wait_s=waits)
    def routers_claim_all_that_they_ever_found(self, slot: int, chance: int, wait_s: float) -> None:
        self.claim_all(slot, chance, wait_s)

    @precondition(lambda machine: machine.unsent())
    @rule(index=index, slot=slots, prompt=prompts, pace=paces, twice=st.booleans())
    def a_router_sends(self, index: int, slot: int, prompt: str, pace: Pace, twice: bool) -> None:
        unsent = self.unsent()
        self.sent(unsent[index % len(unsent)], slot, prompt, pace, twice)

    @precondition(lambda machine: machine.unsent())
    @rule(index=index)
    def a_router_returns(self, index: int) -> None:
        unsent = self.unsent()
        self.world.give_back(unsent[index % len(unsent)])

    @rule(index=index)
    def the_agent_renews(self, index: int) -> None:
        owner, leases = self.agent(0).owner, list(self.world.engine.leases)
        if leases:
            _, _, effects = owner.renew([leases[index % len(leases)]])
            self.agent(0).perform(effects, self.world.now)

    @precondition(lambda machine: machine.step_count >= 15)
    @rule()
    def everything_calms_down(self) -> None:
        self.step_count = 0
        self.world.calm_down()

    # --- what fails

    @in_case("agents crash")
    @rule(slot=slots, replayed=st.sampled_from([0, 1, 9, 9]), seconds=st.sampled_from([0.5, 12.0, 12.0, 46.0]))
    def an_agent_restarts(self, slot: int, replayed: int, seconds: float) -> None:
        """The first connection may break in the middle of the replay."""
        world = self.world
        world.crash(self.agent(slot))
        world.connect(world.listener)
        world.link.pump(world.now, replayed)
        if replayed < _MAX_RETAINED:
            world.cut()
        world.passes(seconds)

    @in_case("agents crash")
    @rule(slot=slots)
    def the_other_agent_takes_over(self, slot: int) -> None:
        agent = self.agent(1)
        agent.reachable, self.agent(0).reachable = True, bool(slot)
        self.world.connect(agent)

    @in_case("agents freeze")
    @rule(slot=slots, seconds=st.sampled_from([1.0, 9.0, 12.0, 40.0]))
    def an_agent_freezes(self, slot: int, seconds: float) -> None:
        self.world.freeze(self.agent(slot), seconds)

    @in_case("agents are cut off")
    @rule(slot=slots, seconds=st.sampled_from([0.5, 12.0]))
    def an_agent_is_cut_off_or_back(self, slot: int, seconds: float) -> None:
        agent = self.agent(slot)
        agent.reachable = not agent.reachable
        self.world.passes(seconds)

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
    @rule(seconds=st.sampled_from([0.5, 20.0, 3600.0]))
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

    @in_case("memory is short")
    @rule(free=st.sampled_from([0, 990, 996]))
    def running_requests_fill_the_engine(self, free: int) -> None:
        self.world.engine.free_count = free
        self.world.passes(0.1)

    @in_case("notifications are lost")
    @rule(lost=st.booleans(), delay_s=st.sampled_from([0.0, 1.5]))
    def the_network_to_the_engine_changes(self, lost: bool, delay_s: float) -> None:
        self.world.notifications_lost, self.world.notification_delay_s = lost, delay_s

    @in_case("operators interfere")
    @rule(slot=slots, index=index)
    def an_operator_releases(self, slot: int, index: int) -> None:
        leases = list(self.world.engine.leases)
        if leases:
            self.release(self.agent(slot), leases if index == 0 else [leases[index % len(leases)]])

    @in_case("operators interfere")
    @rule(slot=slots)
    def an_operator_drains(self, slot: int) -> None:
        agent = self.agent(slot)
        agent.drained = True
        agent.hear(ev.DrainAsked(), self.world.now)

    # --- what routers do

    def claim_all(self, slot: int, chance: int, wait_s: float) -> None:
        """Claims everything that routers have ever found; the last claim may go wrong."""
        self.found(0)
        *most, last = [None, *self.remembered]
        for pointer in most:
            self.claimed(pointer, slot, 0, 0.0)
        self.claimed(last, slot, chance, wait_s)

    def claimed(self, pointer: Pointer | None, slot: int, chance: int, wait_s: float) -> Given | None:
        """Claims what a pointer leads to; returns the grant that a router got."""
        world, agent, fate = self.world, self.agent(slot), self.fates[chance % len(self.fates)]
        if pointer is None or agent.frozen:
            return None
        scope = "scope-2" if fate == "other scope" else SCOPE
        request = ClaimRequest(f"request-{next(world.ids)}", pointer.set_id, pointer.engine_id, scope, WEIGHTS)
        if fate == "returned first":
            agent.perform(agent.owner.give_back(request.request_id, world.now), world.now)
        world.notes_vanish = fate == "note vanishes"
        given = world.claim(agent, request, frozen_s=wait_s if fate == "agent freezes" else 0.0)
        world.notes_vanish = False
        if isinstance(given, Refusal):
            return None
        assert fate not in ("returned first", "other scope"), "granted although it must not be"
        self.follow(fate, agent, request, given, wait_s)
        return given

    def follow(self, fate: str, agent: AgentProcess, request: ClaimRequest, given: Given, wait_s: float) -> None:
        """Lets happen what may come after a grant."""
        world = self.world
        match fate:
            case "asked again":
                world.claim(agent, request, broken=bool(wait_s))
            case "lost":
                world.give_back(given)
            case "engine restarts":
                world.restart_engine(noticed=bool(wait_s))
            case "operator releases":
                self.release(agent, [request.set_id])
            case "agent crashes" | "note vanishes":
                if "agents crash" in self.faults:
                    world.crash(agent)
            case "agent is cut off":
                agent.reachable = False
        if fate not in _USUAL:
            world.passes(wait_s or 12.0)
            if "operators interfere" in self.faults:
                self.release(self.agent(0), list(world.engine.leases))
            else:
                self.claim_all(0, 0, 0.0)

    def found(self, index: int) -> Pointer | None:
        """Returns a pointer that a router finds now, or found at some time (every third index)."""
        now = list(self.world.etcd.state.pointers)
        if not now:
            self.a_turn_ends(index % 3, 120.0, 131)
            self.world.passes(0.5)
            now = list(self.world.etcd.state.pointers)
        self.remembered = [*self.remembered, *(one for one in now if one not in self.remembered)][-_MAX_REMEMBERED:]
        pointers = now if index % 3 or not self.remembered else self.remembered
        return pointers[index // 3 % len(pointers)] if pointers else None

    def release(self, agent: AgentProcess, request_ids: list[str]) -> None:
        """Asks an agent for a release."""
        _, effects = agent.owner.release(request_ids, self.world.now)
        agent.perform(effects, self.world.now)

    def unsent(self) -> list[Given]:
        """Returns the grants that routers hold and have not used yet."""
        return [given for given in self.world.truth.given if given.usable and not given.sent]

    def sent(self, given: Given, slot: int, prompt: str, pace: Pace, twice: bool) -> None:
        """Sends a handle, or sends it twice."""
        world = self.world
        if "reads are slow" not in self.faults:
            pace = replace(pace, block_s=0.01)
        tokens = prompt_of(world.engine.turns[given.set_id], prompt)
        identity = _ANOTHERS if prompt == "another tenant's" else IDENTITY
        for _ in range(2 if twice and "handles come twice" in self.faults else 1):
            world.send(given, slot, tokens, identity, pace)

    def agent(self, slot: int) -> AgentProcess:
        """Returns the agent that the connector is, or will be, connected to (0), or the other one (1)."""
        here = self.world.agents.index(self.world.link.agent or self.world.listener)
        return self.world.agents[here ^ slot]

    # --- what holds

    @invariant()
    def owners_know_nothing_that_was_not_reported(self) -> None:
        self.step_count += 1
        if self.begun:
            self.world.judge_owners()

    def teardown(self) -> None:
        if self.begun and sys.exc_info()[0] is None:
            self.world.calm_down()


def prompt_of(tokens: list[int], kind: str) -> list[int]:
    """Returns the prompt that comes for a turn of `tokens`."""
    match kind:
        case "continued" | "another tenant's":
            return [*tokens, 7, 8, 9]
        case "edited":
            return [*tokens[:100], 5, *tokens[101:], 7]
        case "cut":
            return tokens[:100]
        case _:
            return [token + 1 for token in tokens]
