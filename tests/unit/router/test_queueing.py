"""Who runs, who waits, who goes."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backhaul_router.core.queueing import Entry, Refusal, State, TenantLimits, Ticket, TurnQueue

Limits = Mapping[str, TenantLimits]


class Line:
    """A queue, and a clock that the test moves."""

    def __init__(self, *, max_turns: int = 1, max_queued: int = 10, limits: Limits | None = None) -> None:
        self.queue = TurnQueue(max_turns=max_turns, max_queued=max_queued, limits=limits or {})
        self.now = 0.0

    def enter(self, tenant: str = "a", *, within_s: float = math.inf) -> Entry:
        return self.queue.enter(tenant, now=self.now, deadline=self.now + within_s)

    def come(self, *tenants: str) -> list[Ticket]:
        """Turns come one after the other."""
        return [self.enter(tenant).ticket for tenant in tenants]

    def end(self, ticket: Ticket, *, after_s: float = 0.0) -> Ticket | None:
        self.now += after_s
        return self.queue.leave(ticket, now=self.now)

    def order(self, running: Ticket) -> list[Ticket]:
        """Ends one turn after the other, from a running one; returns those that ran instead."""
        order: list[Ticket] = []
        ticket: Ticket | None = running
        while (ticket := self.end(ticket) if ticket else None) is not None:
            order.append(ticket)
        return order


def prioritised(**priorities: int) -> dict[str, TenantLimits]:
    return {tenant: TenantLimits(priority=priority) for tenant, priority in priorities.items()}


# Running and waiting


def test_turns_run_up_to_the_limit_and_then_wait_in_the_order_they_came() -> None:
    line = Line(max_turns=2)
    first, second, third, fourth = line.come(*"aaaa")
    assert [first.state, second.state, third.state, fourth.state] == [State.RUNNING] * 2 + [State.WAITING] * 2
    assert line.end(second) is third
    assert line.end(first) is fourth
    assert (line.queue.running_count, line.queue.waiting_count) == (2, 0)


def test_without_a_queue_what_is_too_much_is_refused_at_once() -> None:
    line = Line(max_queued=0)
    line.come("a")
    (refused,) = line.come("a")
    assert (refused.state, refused.refusal) == (State.REFUSED, Refusal.TOO_MANY_TURNS)
    assert line.end(refused) is None
    assert line.queue.running_count == 1


def test_a_full_queue_refuses() -> None:
    line = Line(max_queued=2)
    assert [ticket.refusal for ticket in line.come(*"aaaa")] == [None, None, None, Refusal.TOO_MANY_TURNS]


def test_one_that_leaves_while_it_waits_is_passed_over_and_its_place_is_free() -> None:
    line = Line(max_queued=2)
    running, second, third = line.come(*"aaa")
    assert line.end(second) is None
    (fourth,) = line.come("a")
    assert line.order(running) == [third, fourth]


def test_leaving_twice_changes_nothing() -> None:
    line = Line()
    running, _ = line.come("a", "a")
    line.end(running)
    assert line.end(running) is None
    assert (line.queue.running_count, line.queue.waiting_count) == (1, 0)


# Tenants


def test_a_tenant_at_its_own_limit_waits_while_others_run() -> None:
    line = Line(max_turns=3, limits={"a": TenantLimits(max_turns=1)})
    first, second, other = line.come("a", "a", "b")
    assert (second.state, other.state) == (State.WAITING, State.RUNNING)
    assert line.end(other) is None
    assert line.end(first) is second


def test_a_tenant_at_its_own_limit_stands_in_nobodys_way() -> None:
    line = Line(max_turns=2, limits={"a": TenantLimits(max_turns=1, priority=9)})
    _, b, *_, waiting = line.come("a", "b", "a", "a", "b")
    assert line.end(b) is waiting


@pytest.mark.parametrize("max_queued", [0, 1])
def test_a_tenant_beyond_its_own_limits_is_told_so(max_queued: int) -> None:
    line = Line(max_turns=5, limits={"a": TenantLimits(max_turns=1, max_queued=max_queued)})
    *_, refused = line.come("a", *"a" * max_queued, "a")
    assert refused.refusal is Refusal.TENANT_LIMIT
    assert line.come("b")[0].state is State.RUNNING


def test_a_tenant_at_its_own_limit_is_told_so_where_nothing_waits() -> None:
    line = Line(max_turns=5, max_queued=0, limits={"a": TenantLimits(max_turns=1)})
    assert line.come("a", "a")[1].refusal is Refusal.TENANT_LIMIT


def test_a_tenant_below_its_own_limit_is_told_that_the_router_is_full() -> None:
    line = Line(max_turns=1, max_queued=0, limits={"a": TenantLimits(max_turns=2)})
    assert line.come("b", "a")[1].refusal is Refusal.TOO_MANY_TURNS


# Limits that change


def test_turns_that_wait_run_when_their_tenant_may_have_more() -> None:
    line = Line(max_turns=3, limits={"a": TenantLimits(max_turns=1)})
    first, *waiting = line.come("a", "a", "a", "a")
    assert line.queue.limit({"a": TenantLimits(max_turns=9)}, now=line.now) == waiting[:2]
    assert [ticket.state for ticket in waiting] == [State.RUNNING, State.RUNNING, State.WAITING]
    assert line.end(first) is waiting[2]


def test_turns_go_on_when_their_tenant_may_have_less_and_no_more_begin() -> None:
    line = Line(max_turns=3)
    first, second, _, waiting = line.come("a", "a", "b", "a")
    assert line.queue.limit({"a": TenantLimits(max_turns=1, max_queued=0)}, now=line.now) == []
    assert [ticket.state for ticket in (first, second, waiting)] == [State.RUNNING, State.RUNNING, State.WAITING]
    assert line.come("a")[0].refusal is Refusal.TENANT_LIMIT
    assert line.end(first) is None
    assert line.end(second) is waiting


def test_a_new_priority_counts_for_those_that_wait_already() -> None:
    line = Line()
    running, first, later = line.come("x", "a", "b")
    line.queue.limit(prioritised(b=1), now=line.now)
    assert line.order(running) == [later, first]


# Order


def test_higher_priority_comes_first_whoever_waits_longer() -> None:
    line = Line(limits=prioritised(high=5, low=-5))
    running, low, normal, high = line.come("x", "low", "normal", "high")
    assert line.order(running) == [high, normal, low]


def test_a_tenant_with_many_turns_does_not_hold_up_one_with_few() -> None:
    line = Line()
    running, *many, few = line.come("x", "a", "a", "a", "b")
    assert line.order(running) == [many[0], few, *many[1:]]


def test_tenants_take_turns() -> None:
    line = Line()
    running, *_ = line.come("x", "a", "a", "a", "b", "b", "c")
    assert "".join(ticket.tenant for ticket in line.order(running)) == "abcaba"


def test_a_slot_goes_to_the_tenant_that_runs_least() -> None:
    line = Line(max_turns=4)
    _, _, ended, _, _, b = line.come("a", "a", "x", "b", "a", "b")
    assert line.end(ended) is b


# Making room


def test_a_higher_priority_displaces_the_newest_of_the_lowest() -> None:
    line = Line(max_queued=3, limits=prioritised(high=1, low=-1))
    _, low, newest, normal = line.come("x", "low", "low", "x")
    entry = line.enter("high")
    assert (entry.ticket.state, entry.displaced) == (State.WAITING, newest)
    assert (newest.state, newest.refusal) == (State.REFUSED, Refusal.DISPLACED)
    assert (low.state, normal.state, line.queue.waiting_count) == (State.WAITING, State.WAITING, 3)
    assert line.end(newest) is None


def test_nothing_is_displaced_for_a_lower_priority() -> None:
    line = Line(max_queued=1, limits=prioritised(low=-1))
    line.come("x", "x")
    entry = line.enter("low")
    assert (entry.ticket.refusal, entry.displaced) == (Refusal.TOO_MANY_TURNS, None)


def test_a_tenant_that_fills_the_queue_makes_room_for_others_of_its_priority() -> None:
    line = Line(max_queued=5)
    line.come("x", *"aaaaa")
    refusals = [ticket.refusal for ticket in line.come(*"bbb", *"a")]
    assert refusals == [None, None, Refusal.TOO_MANY_TURNS, Refusal.TOO_MANY_TURNS]
    assert line.queue.waiting_count == 5


def test_nothing_is_displaced_for_one_whose_deadline_cannot_be_met() -> None:
    line = Line(max_queued=1, limits=prioritised(high=1))
    running, waiting = line.come("x", "x")
    line.end(running, after_s=10)
    (last,) = line.come("x")
    entry = line.enter("high", within_s=1)
    assert (entry.ticket.refusal, entry.displaced) == (Refusal.DEADLINE_UNREACHABLE, None)
    assert (waiting.state, last.state) == (State.RUNNING, State.WAITING)


# Waits


def taught(seconds: float, *, max_turns: int = 1, max_queued: int = 10, limits: Limits | None = None) -> Line:
    """Returns a queue whose turns have taken so long."""
    line = Line(max_turns=max_turns, max_queued=max_queued, limits=limits)
    line.end(line.enter("teacher").ticket, after_s=seconds)
    return line


def test_the_wait_is_unknown_until_a_turn_has_ended_and_then_nothing_is_refused_for_it() -> None:
    line = Line()
    line.come("a")
    entry = line.enter("a", within_s=0.001)
    assert (entry.wait_s, entry.ticket.state) == (None, State.WAITING)


def test_the_wait_is_the_place_in_line_times_the_time_between_two_free_slots() -> None:
    line = taught(10.0, max_turns=5)
    assert [line.enter("a").wait_s for _ in range(8)] == [0, 0, 0, 0, 0, 2, 4, 6]


def test_a_tenant_waits_for_its_own_turns_where_its_own_limit_is_the_lower() -> None:
    line = taught(10.0, max_turns=100, limits={"a": TenantLimits(max_turns=2)})
    assert [line.enter("a").wait_s for _ in range(4)] == [0, 0, 5, 10]


def test_those_who_come_later_but_run_earlier_count_and_those_that_cannot_do_not() -> None:
    blocked = TenantLimits(max_turns=1, priority=9)
    line = taught(10.0, max_turns=10, max_queued=100, limits={"blocked": blocked, "high": TenantLimits(priority=1)})
    line.come("blocked", *"x" * 9)
    line.come(*["blocked"] * 20, *["high"] * 3, *["fair"] * 5)
    assert line.queue.wait_s("high") == 4
    assert line.queue.wait_s("new") == 5
    assert line.queue.wait_s("fair") == 9


def test_the_mean_follows_what_turns_take_now() -> None:
    line = taught(1.0)
    for _ in range(300):
        line.end(line.enter().ticket, after_s=4.0)
    line.come("a")
    assert line.queue.wait_s("a") == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize(("within_s", "state"), [(10.0, State.WAITING), (9.9, State.REFUSED)])
def test_a_deadline_that_the_wait_would_pass_is_refused_at_once(within_s: float, state: State) -> None:
    line = taught(10.0)
    line.come("a")
    assert line.enter("a", within_s=within_s).ticket.state is state


def test_a_deadline_that_has_passed_begins_nothing_though_a_slot_is_free() -> None:
    assert Line().enter(within_s=0).ticket.refusal is Refusal.DEADLINE_PASSED


# Whatever happens


_LIMITS = st.builds(
    TenantLimits,
    max_turns=st.none() | st.integers(1, 3),
    max_queued=st.none() | st.integers(0, 3),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
)
_TENANTS = ("a", "b", "c")


class Whatever(RuleBasedStateMachine):
    """Turns come, end and leave in any order."""

    @initialize(
        max_turns=st.integers(1, 5),
        max_queued=st.integers(0, 6),
        limits=st.fixed_dictionaries(dict.fromkeys(_TENANTS, _LIMITS)),
    )
    def begin(self, max_turns: int, max_queued: int, limits: Limits) -> None:
        self.limits, self.max_turns, self.max_queued = limits, max_turns, max_queued
        self.queue = TurnQueue(max_turns=max_turns, max_queued=max_queued, limits=limits)
        self.tickets: list[Ticket] = []
        self.now = 0.0
        self.had = dict.fromkeys(_TENANTS, (0, 0))

    @rule(limits=st.fixed_dictionaries(dict.fromkeys(_TENANTS, _LIMITS)))
    def limit(self, limits: Limits) -> None:
        before, waiting = self.of(State.RUNNING), self.of(State.WAITING)
        self.limits, self.had = limits, {tenant: self.counts(tenant) for tenant in _TENANTS}
        started = self.queue.limit(limits, now=self.now)
        assert self.of(State.RUNNING) == before | set(started)
        assert self.of(State.WAITING) == waiting - set(started)

    @rule(tenant=st.sampled_from(_TENANTS), within_s=st.sampled_from([0.0, 0.5, math.inf, math.inf, math.inf]))
    def come(self, tenant: str, within_s: float) -> None:
        before = self.of(State.RUNNING), self.of(State.WAITING)
        entry = self.queue.enter(tenant, now=self.now, deadline=self.now + within_s)
        if entry.displaced:
            assert entry.displaced in before[1]
            assert entry.displaced.refusal is Refusal.DISPLACED
            assert self.priority(entry.displaced) <= self.priority(entry.ticket)
        if entry.ticket.refusal is None:
            self.tickets.append(entry.ticket)
        assert self.of(State.RUNNING) >= before[0]
        assert self.of(State.WAITING) >= before[1] - {entry.displaced}
        if entry.ticket.refusal is not None:
            assert (self.of(State.RUNNING), self.of(State.WAITING)) == before

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), after_s=st.sampled_from([0.0, 1.0]))
    def go(self, data: st.DataObject, after_s: float) -> None:
        self.now += after_s
        ticket = data.draw(st.sampled_from(self.tickets))
        waiting, older = self.of(State.WAITING), ticket.state
        instead = self.queue.leave(ticket, now=self.now)
        self.tickets.remove(ticket)
        if older is not State.RUNNING:
            assert instead is None
        if instead is not None:
            self.may_go_first(instead, waiting)

    def may_go_first(self, chosen: Ticket, waiting: set[Ticket]) -> None:
        """Nobody of a higher priority could have run, and none of its tenant came before it."""
        running = self.running(chosen.tenant) - 1
        for other in waiting - {chosen}:
            if self.room(other.tenant) > 0 and other.tenant != chosen.tenant:
                assert self.priority(other) <= self.priority(chosen)
                if self.priority(other) == self.priority(chosen):
                    assert running <= self.running(other.tenant)
        same = [ticket for ticket in self.tickets if ticket in waiting and ticket.tenant == chosen.tenant]
        assert same[0] is chosen

    def of(self, state: State) -> set[Ticket]:
        return {ticket for ticket in self.tickets if ticket.state is state}

    def running(self, tenant: str) -> int:
        return sum(ticket.tenant == tenant for ticket in self.of(State.RUNNING))

    def counts(self, tenant: str) -> tuple[int, int]:
        """Turns that run and that wait."""
        return self.running(tenant), sum(ticket.tenant == tenant for ticket in self.of(State.WAITING))

    def room(self, tenant: str) -> float:
        limit = self.limits[tenant].max_turns
        return math.inf if limit is None else limit - self.running(tenant)

    def priority(self, ticket: Ticket) -> int:
        return self.limits[ticket.tenant].priority

    @invariant()
    def no_more_run_or_wait_than_may(self) -> None:
        waiting = self.of(State.WAITING)
        assert len(self.of(State.RUNNING)) == self.queue.running_count <= self.max_turns
        assert len(waiting) == self.queue.waiting_count <= self.max_queued
        for tenant, limits in self.limits.items():
            running, queued = self.counts(tenant)
            # Those that were there when it came to have less may stay.
            had_running, had_queued = self.had[tenant]
            assert limits.max_turns is None or running <= max(limits.max_turns, had_running)
            assert limits.max_queued is None or queued <= max(limits.max_queued, had_queued)
            self.had[tenant] = min(had_running, running), min(had_queued, queued)

    @invariant()
    def nobody_waits_for_a_slot_that_is_free(self) -> None:
        if self.queue.running_count < self.max_turns:
            assert all(self.room(ticket.tenant) <= 0 for ticket in self.of(State.WAITING))

    def teardown(self) -> None:
        """Everybody who waits runs once the others have left, and nothing stays."""
        if not hasattr(self, "queue"):
            return
        waiting = self.of(State.WAITING)
        while running := [ticket for ticket in self.tickets if ticket.state is State.RUNNING]:
            ticket = running[0]
            self.queue.leave(ticket, now=self.now)
            self.tickets.remove(ticket)
            waiting.discard(ticket)
        assert not waiting
        assert (self.queue.running_count, self.queue.waiting_count) == (0, 0)
        assert not self.queue.line_count


Whatever.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestWhatever = Whatever.TestCase
