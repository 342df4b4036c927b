"""The agent's centre: a claim is answered only after its connector was told."""

import asyncio
from dataclasses import dataclass, field

import pytest

from backhaul_common.errors import BackhaulError, UnavailableError
from backhaul_connector import wire
from backhaul_node_agent.agent import Agent
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.granting import ClaimRequest
from backhaul_node_agent.core.life import State
from backhaul_node_agent.core.owner import Owner
from backhaul_node_agent.core.releasing import ReleaseOutcome
from tests.unit.node_agent.owned import LIMITS, OFFSET, block_set, facts

REQUEST = ClaimRequest("request-1", "set-1", "engine-1", "scope-1", "weights")


class StoppedClock:
    """Stands still."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeConnectors:
    """Takes messages, and says whether they got through once it is asked to."""

    told: list[wire.Claimed | wire.Returned] = field(default_factory=list)
    gets_through: bool = True
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    def tell(self, engine_id: str, message: wire.Claimed | wire.Returned) -> None:
        self.told.append(message)

    async def flushed(self, engine_id: str, timeout_s: float) -> bool:
        self.asked.set()
        await self.may_answer.wait()
        return self.gets_through


class NoIndex:
    """Publishes nothing."""

    def open(self, engine_id: str) -> None: ...

    def publish(self, engine_id: str, block_set: BlockSet) -> None: ...

    def unpublish(self, engine_id: str, block_set: BlockSet) -> None: ...

    def forget(self, engine_id: str) -> None: ...

    def let_go(self, engine_id: str, block_set: BlockSet) -> None: ...

    def lease_lost(self) -> None: ...


@dataclass
class FakeNotifier:
    """Records notifications."""

    available: bool = True
    starting: bool = False
    sent: list[ev.SendRelease | ev.SendRenewal] = field(default_factory=list)

    def send(self, effect: ev.SendRelease | ev.SendRenewal) -> None:
        self.sent.append(effect)

    def forget(self, engine_id: str) -> None: ...


@dataclass
class Stage:
    """An agent that holds one set, and what stands around it."""

    connectors: FakeConnectors = field(default_factory=FakeConnectors)
    notifier: FakeNotifier = field(default_factory=FakeNotifier)
    clock: StoppedClock = field(default_factory=StoppedClock)
    changes: int = 0

    def __post_init__(self) -> None:
        self.agent = Agent(
            owner=Owner(session="session-1", limits=LIMITS),
            clock=self.clock,
            connectors=self.connectors,
            index=NoIndex(),
            notifier=self.notifier,
            on_change=self._changed,
        )
        now = self.clock.now
        self.agent.hear(ev.LeaseHeld(now + 1e6, True))
        self.agent.hear(ev.EngineConnected(1, facts(), ""))
        self.agent.hear(ev.ClockObserved(1, "engine-1", now, now + OFFSET, now))
        self.agent.hear(ev.ReplayFinished(1, "engine-1"))
        self.agent.hear(ev.Reported(1, "engine-1", block_set(), now + OFFSET + 480))

    def _changed(self) -> None:
        self.changes += 1

    @property
    def state(self) -> State:
        (held,) = self.agent.sets()
        return held.state

    @property
    def claimed(self) -> bool:
        return self.state is State.CLAIMED


async def test_a_claim_is_answered_once_the_connector_was_told() -> None:
    stage = Stage()
    grant = await stage.agent.claim(REQUEST)
    assert grant.name.set_id == "set-1"
    assert stage.connectors.told == [wire.Claimed(set_id="set-1")]


async def test_a_claim_whose_connector_cannot_be_told_is_refused_and_taken_back() -> None:
    stage = Stage()
    stage.connectors.gets_through = False
    with pytest.raises(BackhaulError) as refused:
        await stage.agent.claim(REQUEST)
    assert refused.value.reason == "CONNECTOR_AWAY"
    assert stage.state is State.HELD
    assert stage.connectors.told == [wire.Claimed(set_id="set-1"), wire.Returned(set_id="set-1")]


async def test_a_claim_is_not_answered_when_the_lease_ends_while_the_connector_is_told() -> None:
    stage = Stage()
    stage.connectors.may_answer.clear()
    claiming = asyncio.create_task(stage.agent.claim(REQUEST))
    await stage.connectors.asked.wait()
    stage.agent.hear(ev.LeaseLost())
    stage.connectors.may_answer.set()
    with pytest.raises(BackhaulError) as refused:
        await claiming
    assert refused.value.reason == "LEASE_INVALID"
    assert stage.state is State.HELD


async def test_a_claim_whose_caller_has_gone_is_taken_back() -> None:
    stage = Stage()
    stage.connectors.may_answer.clear()
    claiming = asyncio.create_task(stage.agent.claim(REQUEST))
    await stage.connectors.asked.wait()
    assert stage.claimed
    claiming.cancel()
    await asyncio.wait([claiming])
    assert stage.state is State.HELD


def test_a_conversation_of_which_nothing_is_behind_the_fence_needs_no_nixl_to_end() -> None:
    stage = Stage(notifier=FakeNotifier(available=False))
    assert stage.agent.release([], scope="scope-1", keys=block_set().keys) == ReleaseOutcome()
    assert stage.state is State.HELD


def test_a_conversation_that_ends_behind_the_fence_has_its_sets_released_after_it() -> None:
    stage = Stage()
    stage.agent.hear(ev.EngineConnected(2, facts(), "another"))
    stage.agent.hear(ev.Reported(2, "engine-1", block_set(), stage.clock.now + OFFSET + 480, replayed=True))
    stage.agent.hear(ev.ReplayFinished(2, "engine-1"))
    assert stage.agent.release([], scope="scope-1", keys=["other", *block_set().keys]).deferred == ["set-1"]
    (before,) = stage.agent.sets()
    stage.clock.now += LIMITS.claim_ttl_s + LIMITS.margin_s + 1
    stage.agent.hear(ev.TimePassed())
    (after,) = stage.agent.sets()
    assert (before.state, after.state) == (State.FENCED, State.RELEASING)


@pytest.mark.parametrize("call", ["release", "renew"])
async def test_an_agent_whose_nixl_is_still_loading_asks_for_a_moment(call: str) -> None:
    stage = Stage(notifier=FakeNotifier(available=False, starting=True))
    with pytest.raises(UnavailableError) as refused:
        getattr(stage.agent, call)(["set-1"])
    assert refused.value.reason == "NIXL_STARTING"
    assert stage.state is State.HELD


def test_a_drain_waits_for_releases_that_nixl_will_send_once_it_has_loaded() -> None:
    stage = Stage(notifier=FakeNotifier(available=False, starting=True))
    stage.agent.drain()
    assert stage.agent.awaited_count() == 1


@pytest.mark.parametrize("call", ["release", "renew"])
async def test_an_agent_without_nixl_says_that_it_cannot_tell_engines(call: str) -> None:
    stage = Stage(notifier=FakeNotifier(available=False))
    with pytest.raises(BackhaulError) as refused:
        getattr(stage.agent, call)(["set-1"])
    assert refused.value.reason == "NIXL_MISSING"
    assert stage.state is State.HELD


async def test_the_directory_is_told_when_an_engine_comes_or_goes() -> None:
    stage = Stage()
    before = stage.changes
    stage.agent.hear(ev.ConnectorLost(1, "engine-1"))
    stage.agent.hear(ev.EngineGone("engine-1"))
    assert stage.changes == before + 2
