"""What the agent counts, and what is read of its owner."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from backhaul_common.errors import BackhaulError
from backhaul_node_agent import instruments
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.life import State, Why
from backhaul_node_agent.core.tally import End, Tally
from backhaul_node_agent.observing import observe_owner
from tests.fakes.clock import FakeClock
from tests.fakes.readings import Readings
from tests.unit.node_agent.owned import LIMITS, OFFSET, OwnerTable, anchored, block_set, standing
from tests.unit.node_agent.test_agent import REQUEST, Stage


def released(table: OwnerTable) -> dict[str, int]:
    return {why.value: count for why, count in table.owner.tally.releases.items()}


def ended(table: OwnerTable) -> dict[str, int]:
    return {end.value: count for end, count in table.owner.tally.ends.items()}


async def test_claims_are_counted_by_what_came_of_them(read: Readings) -> None:
    stage = Stage()
    await stage.agent.claim(REQUEST)
    for request in (replace(REQUEST, request_id="request-2"), replace(REQUEST, request_id="request-3", set_id="gone")):
        with pytest.raises(BackhaulError):
            await stage.agent.claim(request)
    assert read.counted(instruments.CLAIMS) == {("granted",): 1, ("set_claimed",): 1, ("set_unknown",): 1}


async def test_a_set_is_timed_until_its_pointers_are_durable_and_only_once(read: Readings) -> None:
    stage = Stage()
    stage.clock.now += 0.02
    for _ in range(2):
        stage.agent.hear(ev.PointersWritten("engine-1", ["set-1", "unknown"]))
    [point] = read.points(instruments.PUBLISH_DURATION.name)
    assert (point.count, point.sum) == (1, pytest.approx(0.02))


async def test_renewals_and_what_engines_confirm_are_counted(read: Readings) -> None:
    stage = Stage()
    stage.agent.hear(ev.PublisherUp("engine-1"))
    now = stage.clock.now + OFFSET
    stage.agent.hear(ev.Reported(1, "engine-1", block_set("set-2", ended_at=now), now + 20))
    stage.agent.hear(ev.RetentionDue())
    stage.agent.hear(ev.DeadlinesConfirmed(1, "engine-1", {"set-2": now + 100, "other": 1.0}))
    assert read.of(instruments.RENEWALS) == {(): 1}
    assert read.of(instruments.CONFIRMED) == {(): 2}


def test_how_much_is_free_is_not_said_until_an_engine_says_it(read: Readings) -> None:
    table = standing()
    observe_owner(table.owner, FakeClock(), ready=lambda: True, foreign=lambda: 0)
    assert (read.of(instruments.BLOCKS), read.of(instruments.FREE_BLOCKS)) == ({(): 1000}, {})
    table.memory(free_count=0)
    assert read.of(instruments.FREE_BLOCKS) == {(): 0}


def test_what_is_held_is_read_of_the_owner(read: Readings) -> None:
    table, clock = standing(limits=replace(LIMITS, retained_share=0.5)), FakeClock()
    ready = [True]
    observe_owner(table.owner, clock, ready=lambda: ready[0], foreign=lambda: 3)
    table.report("a")
    table.report("b")
    table.granted("b")
    table.memory(free_count=900)
    levels = {
        metric.name.removeprefix("backhaul.agent."): read.of(metric)
        for metric in (
            instruments.READY,
            instruments.LEASE,
            instruments.CONNECTORS,
            instruments.BLOCKS,
            instruments.FREE_BLOCKS,
            instruments.RETAINED_BLOCKS,
            instruments.BUDGET_BLOCKS,
            instruments.UNPUBLISHED,
            instruments.FOREIGN_LEASES,
        )
    }
    assert levels == {
        "ready": {(): 1},
        "lease": {(): 1},
        "connectors": {(): 1},
        "blocks": {(): 1000},
        "blocks.free": {(): 900},
        "blocks.retained": {(): 8},
        "blocks.budget": {(): 500},
        # A granted set is found by nobody any more.
        "block_sets.unpublished": {(): 1},
        "foreign_leases": {(): 3},
    }
    assert read.of(instruments.BLOCK_SETS) == {("held",): 1, ("claimed",): 1, ("fenced",): 0, ("releasing",): 0}
    table.hear(ev.LeaseLost())
    table.disconnect()
    ready[0] = False
    assert [read.of(one)[()] for one in (instruments.READY, instruments.LEASE, instruments.CONNECTORS)] == [0, 0, 0]


def test_releases_and_ends_are_read_of_the_owner(read: Readings) -> None:
    table = standing()
    observe_owner(table.owner, FakeClock(), ready=lambda: True, foreign=lambda: 0)
    table.report("a")
    table.report("b")
    table.release("a")
    table.free("a", "b")
    assert read.counted(instruments.RELEASES) == {("asked",): 1}
    assert read.counted(instruments.ENDS) == {("released",): 1, ("freed",): 1}


def _drain(table: OwnerTable) -> None:
    table.hear(ev.DrainAsked())


def _supersede(table: OwnerTable) -> None:
    table.retention()
    table.report("newer", **anchored(300), continues=("key-of-set-1",))


def _fill(table: OwnerTable) -> None:
    table.retention()
    table.memory(free_count=0, waiting_count=1000)


def _expire(table: OwnerTable) -> None:
    table.passes(500)


def _lapse(table: OwnerTable) -> None:
    table.granted()
    table.passes(60)


def _give_back_unwanted(table: OwnerTable) -> None:
    table.granted()
    table.release("set-1")
    table.give_back()


def _jump(table: OwnerTable) -> None:
    table.now += 10
    table.ping(offset=OFFSET + 3600)


def _stay_unpublished(table: OwnerTable) -> None:
    table.passes(61)
    table.retention()


def _keep_long(table: OwnerTable) -> None:
    table.hear(ev.PointersWritten("engine-1", ["set-1"]))
    table.confirm("set-1", 1e6)
    table.passes(1801, step_s=100)
    table.ping()
    table.retention()


@pytest.mark.parametrize(
    ("why", "happens"),
    [
        (Why.ASKED, lambda table: table.release("set-1")),
        (Why.ASKED, _give_back_unwanted),
        (Why.DRAINING, _drain),
        (Why.SUPERSEDED, _supersede),
        (Why.OVER_BUDGET, _fill),
        (Why.OLD, _keep_long),
        (Why.UNPUBLISHED, _stay_unpublished),
        (Why.EXPIRED, _expire),
        (Why.LAPSED, _lapse),
        (Why.CLOCK_JUMPED, _jump),
    ],
    ids=lambda value: value.value if isinstance(value, Why) else "",
)
def test_a_release_is_counted_once_with_its_reason(why: Why, happens: Callable[[OwnerTable], object]) -> None:
    table = standing()
    table.report(**anchored(200))
    happens(table)
    table.passes(5)
    assert released(table) == {why.value: 1}


def test_a_set_that_another_agent_granted_is_released_for_the_fence() -> None:
    table = OwnerTable()
    table.join()
    table.connect(last_session="another", replay=False)
    table.report(replayed=True, granted=True)
    table.replayed()
    table.publishing()
    table.passes(LIMITS.claim_ttl_s + LIMITS.margin_s + 1)
    assert released(table) == {Why.FENCED.value: 1}


@pytest.mark.parametrize(
    ("end", "happens"),
    [
        (End.READ, lambda table: (table.granted(), table.free("set-1"))),
        (End.RELEASED, lambda table: (table.release("set-1"), table.free("set-1"))),
        (End.FREED, lambda table: table.free("set-1")),
        (End.ENGINE_GONE, lambda table: table.hear(ev.EngineGone("engine-1"))),
    ],
    ids=lambda value: value.value if isinstance(value, End) else "",
)
def test_an_end_is_counted_once_with_how_it_came(end: End, happens: Callable[[OwnerTable], object]) -> None:
    table = standing()
    table.report()
    happens(table)
    assert ended(table) == {end.value: 1}


EVENTS = (
    lf.Confirmed(50.0),
    lf.Seen(True, 50.0),
    lf.Found(True, 50.0),
    lf.FenceLifted(),
    lf.ClaimAsked("request-1"),
    lf.ClaimReturned(),
    lf.ReleaseAsked(),
    lf.PointerGone(),
    lf.ClockJumped(),
    lf.Freed(),
    lf.Tick(),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_there_is_a_name_for_whatever_can_become_of_a_set(state: State, event: lf.Event) -> None:
    for wanted, deadline, lapses_at in itertools.product((False, True), (0.0, 1e6), (0.0, 1e6)):
        claim = lf.Claim("request-1", deadline, lapses_at) if state is State.CLAIMED else None
        life = lf.Life(block_set(), state, deadline, claim=claim, granted_before=wanted, release_wanted=wanted)
        try:
            after = lf.step(life, event, lf.Instant(100.0, 100.0, 100.0), LIMITS).life
        except lf.IllegalEventError:
            continue
        tally = Tally()
        tally.note(life, event, after)
        moved = after is None or (after.state is State.RELEASING and state is not State.RELEASING)
        assert sum(tally.ends.values()) + sum(tally.releases.values()) == moved
