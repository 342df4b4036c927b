"""From any state, the owner's table, what the engine retains and the index come to agree within a bounded time."""

import os
from dataclasses import dataclass
from enum import Enum

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backhaul_node_agent.core.granting import ClaimRequest, Refusal
from backhaul_node_agent.core.life import State
from tests.model.agent import LIMITS
from tests.model.engine import BLOCK_COUNT, IDENTITY, SCOPE, WEIGHTS
from tests.model.etcd import LEASE_TTL_S
from tests.model.prefill import Pace
from tests.model.starting import Beginning, Belief, Found, Lease, Start, Successor, Turn

CLAIMED_S = LIMITS.claim_ttl_s + LIMITS.margin_s + 5.0
"""A claim that is never read has lapsed and its set is released; so has every claim of another agent."""
FENCED_S = LEASE_TTL_S + 2.0 + CLAIMED_S
"""An earlier session's lease has ended, and what it may have granted is over."""
UNPUBLISHED_S = LIMITS.unpublished_s + 5.0
"""What the registry does not take over is released."""
_STEP_S = 1.0


class Fate(Enum):
    """What a router does with a claim."""

    READ = "reads"
    RETURN = "returns it"
    FORGET = "never uses it"


@dataclass(frozen=True, slots=True)
class Interference:
    """Routers claim everything that they know, and operators have sets released, and ids that are not ours."""

    at_s: int
    released: frozenset[int]
    """Indices of sets."""
    fates: tuple[Fate, ...]
    """Of the first claim, the second, and so on, again and again."""


_DOOMED = (Belief.CLAIMED, Belief.ADOPTED, Belief.FENCED_GRANTED)
_OFTEN = (Belief.NOTHING, Belief.HELD, Belief.HELD, Belief.FENCED)
_lefts = st.sampled_from([-5.0, 0.5, 9.0, 20.0, 45.0, *[1000.0] * 7])
turns = st.builds(
    Turn,
    conversation=st.integers(0, 2),
    count=st.sampled_from([71, 131, 201]),
    edited=st.booleans(),
    left_s=_lefts,
    gone=st.sampled_from([*[False] * 5, True]),
    late=st.sampled_from([*[False] * 5, True]),
    marked=st.sampled_from([*[False] * 3, True]),
    claim_left_s=st.sampled_from([None, 3.0, LIMITS.claim_ttl_s]),
    belief=st.sampled_from((*_OFTEN * 2, *_DOOMED)),
    believed_left_s=_lefts,
    release_wanted=st.sampled_from([*[False] * 3, True]),
)
pointers = st.builds(
    Found,
    turn=st.integers(0, 9),
    conversation=st.integers(0, 2),
    incarnation=st.integers(0, 1),
    lease=st.integers(0, 5),
)
starts = st.builds(
    Start,
    rates=st.tuples(*[st.sampled_from([1 - 200e-6, 1.0, 1 + 200e-6])] * 3),
    retaining=st.booleans(),
    deaf=st.sampled_from([*[False] * 4, True]),
    restarted=st.booleans(),
    turns=st.lists(turns, min_size=2, max_size=7).map(tuple),
    foreign_left_s=st.lists(_lefts, max_size=3).map(tuple),
    running_count=st.sampled_from([0, 0, 8985, 8992, BLOCK_COUNT]),
    lease=st.sampled_from([Lease.HELD, Lease.HELD, *Lease]),
    successor=st.sampled_from([Successor.SAME, *Successor]),
    notifications=st.tuples(st.booleans(), st.sampled_from([0.0, 1.5])),
    ticked=st.sampled_from([False, True, True]),
    noticed=st.booleans(),
    repaired_s=st.sampled_from([0.0, 0.0, 8.0]),
    replayed=st.sampled_from([None, 0, 1, 10, 10]),
    broken=st.booleans(),
    found=st.lists(pointers, max_size=6).map(tuple),
    restored=st.booleans(),
    holder=st.booleans(),
)
interferences = st.lists(
    st.builds(
        Interference,
        at_s=st.sampled_from([0, 0, 0, 1, 2, 5, 10, 30, 38, 50, 60]),
        released=st.frozensets(st.integers(0, 6), max_size=2),
        fates=st.lists(st.sampled_from(Fate), min_size=1, max_size=3).map(tuple),
    ),
    max_size=3,
)


class Convergence:
    """Lets everything work, and judges what comes of it. Grants, releases and renewals are judged by the world."""

    def __init__(self, beginning: Beginning) -> None:
        self.beginning = beginning
        self.world = beginning.world
        self.unread: dict[str, float] = {}
        """Sets whose claims are never used, and since when."""
        self.read: set[str] = set()
        self.asked: set[str] = set()
        """Sets that an operator had released."""
        for agent in (self.world.listener, beginning.believer):
            agent.reachable = True

    def works_for(self, seconds: float) -> None:
        """Lets time pass."""
        for _ in range(int(seconds / _STEP_S)):
            self.world.engine.free_count = self.beginning.free_count()
            self.world.now += _STEP_S
            self.world.notifications_lost = self.world.now < self.beginning.repaired_at
            self.world.settle()
            self.world.judge_owners()
            self.judge_foreign_leases()
            self.judge_orphans()

    def interfere(self, interference: Interference) -> None:
        """Lets operators and routers do what they do."""
        set_ids = list(self.world.engine.turns)
        self._release([set_ids[at] for at in interference.released if at < len(set_ids)])
        self._claim_all(interference.fates)
        self._name_foreign_ids()

    def _release(self, set_ids: list[str]) -> None:
        agent = self.world.listener
        outcome, effects = agent.owner.release(set_ids, self.world.now)
        agent.perform(effects, self.world.now)
        self.asked |= {*outcome.released, *outcome.deferred}

    def _claim_all(self, fates: tuple[Fate, ...]) -> None:
        world, granted = self.world, 0
        for set_id, tokens in world.engine.turns.items():
            request = ClaimRequest(f"request-{next(world.ids)}", set_id, world.engine.engine_id, SCOPE, WEIGHTS)
            given = world.claim(world.listener, request)
            if isinstance(given, Refusal):
                continue
            match fates[granted % len(fates)]:
                case Fate.READ:
                    world.send(given, 0, [*tokens, 7], IDENTITY, Pace())
                    self.read.add(set_id)
                case Fate.RETURN:
                    world.give_back(given)
                case Fate.FORGET:
                    self.unread[set_id] = world.now
            granted += 1

    def _name_foreign_ids(self) -> None:
        world, agent = self.world, self.world.listener
        for foreign in self.beginning.foreign:
            agent.perform(agent.owner.renew([foreign])[2], world.now)
            agent.perform(agent.owner.release([foreign], world.now)[1], world.now)

    def judge_foreign_leases(self) -> None:
        engine = self.world.engine
        shown = engine.clock.at(self.world.now)
        due = {name: deadline for name, deadline in self.beginning.foreign.items() if shown < deadline}
        kept = {name: deadline for name, deadline in engine.leases.items() if name not in engine.turns}
        assert kept == due, "a foreign lease was touched"

    def judge_orphans(self) -> None:
        for set_id, since in self.unread.items():
            late = self.world.now > since + CLAIMED_S
            assert not late or set_id not in self.world.engine.leases, "claimed, never read, and still retained"

    def judge_end(self) -> None:
        """Everything agrees, and nothing is here that should not be, nor gone that should be here."""
        world, beginning = self.world, self.beginning
        owner, engine, start = world.listener.owner, world.engine, beginning.start
        states = {one.name.set_id: one.state for one in owner.sets(world.now)}
        assert set(states.values()) <= {State.HELD}, "unsettled for ever"
        doomed = {set_id for set_id in beginning.set_ids if beginning.doomed(set_id)} | self.asked
        assert not engine.labelled & doomed, "orphans are retained for ever"
        if start.deaf:
            assert owner.connected(engine.engine_id)
            assert states.keys() == engine.labelled, "the owner's table is not what the engine retains"
            assert not start.retaining or not states, "never published, and still retained"
            assert not world.etcd.state.pointers, "the index is not the owner's table"
        else:
            world.judge_agreement()
        if start.retaining:
            most = BLOCK_COUNT * LIMITS.pressure_mark - start.running_count - len(engine.blocks_of(self._foreign()))
            assert len(engine.blocks_of(engine.labelled)) <= max(0.0, most), "over budget"
        else:
            self._judge_survivors(engine.labelled, doomed)

    def _foreign(self) -> set[str]:
        return self.beginning.foreign.keys() & self.world.engine.leases.keys()

    def _judge_survivors(self, labelled: set[str], doomed: set[str]) -> None:
        beginning = self.beginning
        for set_id, turn in zip(beginning.set_ids, beginning.start.turns, strict=True):
            gone = (turn.gone and not turn.late) or set_id in {*doomed, *self.unread, *self.read}
            # What another agent was asked to release or to keep was perhaps still on its way.
            if turn.left_s > 500.0 and not gone and State.RELEASING is not beginning.states.get(set_id):
                assert set_id in labelled, f"{set_id} was released though nobody asked for it"


@pytest.mark.timeout(300)
@given(start=starts, interferences=interferences)
@settings(
    max_examples=int(os.environ.get("BACKHAUL_STARTS", "500")),
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_from_any_state_table_engine_and_index_come_to_agree(start: Start, interferences: list[Interference]) -> None:
    convergence = Convergence(Beginning(start))
    for interference in sorted(interferences, key=lambda one: one.at_s):
        convergence.works_for(convergence.beginning.began_at + interference.at_s - convergence.world.now)
        convergence.interfere(interference)
    convergence.works_for(FENCED_S + (UNPUBLISHED_S if start.deaf else 0.0))
    convergence.judge_end()
