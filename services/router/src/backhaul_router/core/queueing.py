"""Which turns run, which wait, and in which order.

Rules. At most so many turns run, and of each tenant no more than its own limit allows. What cannot run waits, if there
is room for it. A slot that gets free goes to a waiting turn whose tenant is below its own limit: of the highest
priority, then of the tenant that runs least, then of the one that was last given a slot longest ago, then the oldest.
So a tenant at its own limit stands in nobody's way, and no slot is free while a turn waits that may have it.

A full queue makes room for a turn of higher priority, or of the same priority and a tenant with fewer turns in it: the
newest turn of the least priority and the longest line is displaced.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

_MEMORY = 64
"""Turns that the mean time of one is taken over, about."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may have, within the router's own limits."""

    max_turns: int | None = None
    """Turns at once; None: no limit of its own."""
    max_queued: int | None = None
    """Turns that wait; None: no limit of its own."""
    priority: int = 0
    """Higher first."""


class State(Enum):
    """Where a turn is."""

    WAITING = "waiting"
    RUNNING = "running"
    REFUSED = "refused"
    LEFT = "left"


class Refusal(Enum):
    """Why a turn neither runs nor waits; the value is the error's code."""

    TENANT_LIMIT = "tenant_limit"
    TOO_MANY_TURNS = "too_many_turns"
    DISPLACED = "displaced"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    DEADLINE_PASSED = "deadline_passed"
    QUEUE_TIMEOUT = "queue_timeout"


@dataclass(eq=False, slots=True)
class Ticket:
    """One turn, from its coming to its going. Only the queue changes it."""

    tenant: str
    state: State = State.WAITING
    refusal: Refusal | None = None
    """Set when it is refused."""
    started_s: float = 0.0
    """When it got its slot."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a turn that came found."""

    ticket: Ticket
    wait_s: float | None
    """How long the wait probably is, seconds; None when unknown, as no turn has ended yet."""
    displaced: Ticket | None = None
    """The turn that had to make room."""


@dataclass(eq=False, slots=True)
class _Line:
    """One tenant's turns."""

    limits: TenantLimits
    running: int = 0
    waiting: dict[Ticket, None] = field(default_factory=dict)
    """Oldest first."""
    served: int = 0
    """Number of the slot that it was last given; slots are numbered as they are given."""

    @property
    def room(self) -> float:
        """Turns that the tenant may run beside those that do."""
        return math.inf if self.limits.max_turns is None else self.limits.max_turns - self.running

    @property
    def full(self) -> bool:
        """Whether no more of its turns may wait."""
        return self.limits.max_queued is not None and len(self.waiting) >= self.limits.max_queued


class TurnQueue:
    """The slots of one router, and the turns that have or want one."""

    def __init__(self, *, max_turns: int, max_queued: int, limits: Mapping[str, TenantLimits]) -> None:
        """``limits`` by tenant; tenants without have none of their own."""
        self.max_turns = max_turns
        self.running_count = 0
        self.waiting_count = 0
        self._max_queued = max_queued
        self._limits = limits
        self._lines: dict[str, _Line] = {}
        """By tenant, those with no turn left out."""
        self._served = 0
        self._ended = 0
        self._mean_s = 0.0

    def enter(self, tenant: str, *, now: float, deadline: float = math.inf) -> Entry:
        """Gives a turn a slot, lets it wait, or refuses it: its ticket's state tells.

        ``deadline`` is when the turn is of no more use. Whoever got a ticket that is not refused leaves with it, once.
        """
        line = self._lines.get(tenant) or _Line(self._limits.get(tenant, TenantLimits()))
        room = line.room > 0 and self.running_count < self.max_turns
        ticket, wait_s = Ticket(tenant), 0.0 if room else self._wait_s(line)
        worse = None if room or self.waiting_count < self._max_queued else self._worse_than(line)
        ticket.refusal = self._refusal(line, wait_s=wait_s, left_s=deadline - now, room=room, worse=worse)
        if ticket.refusal is not None:
            ticket.state = State.REFUSED
            return Entry(ticket, wait_s)
        self._lines[tenant] = line
        if room:
            self._start(ticket, line, now)
        else:
            self._displace(worse)
            line.waiting[ticket] = None
            self.waiting_count += 1
        return Entry(ticket, wait_s, worse)

    def leave(self, ticket: Ticket, *, now: float) -> Ticket | None:
        """Takes a turn out wherever it is; returns the one that runs instead. Nothing happens the second time."""
        before, line = ticket.state, self._lines.get(ticket.tenant)
        if line is None or before not in (State.WAITING, State.RUNNING):
            return None
        if before is State.WAITING:
            self._stop_waiting(ticket, line)
        else:
            line.running -= 1
            self.running_count -= 1
            self._note(now - ticket.started_s)
        ticket.state = State.LEFT
        self._tidy(ticket.tenant, line)
        return self._start_next(now) if before is State.RUNNING else None

    def limit(self, limits: Mapping[str, TenantLimits], *, now: float) -> list[Ticket]:
        """Changes what tenants may have; returns the turns that run by it. Those that run or wait already may stay."""
        self._limits = limits
        for tenant, line in self._lines.items():
            line.limits = limits.get(tenant, TenantLimits())
        return list(iter(lambda: self._start_next(now), None))

    @property
    def line_count(self) -> int:
        """Tenants that have turns here."""
        return len(self._lines)

    def wait_s(self, tenant: str) -> float | None:
        """Returns how long a turn that came now would probably wait, seconds; None when unknown."""
        return self._wait_s(self._lines.get(tenant) or _Line(self._limits.get(tenant, TenantLimits())))

    def _refusal(
        self, line: _Line, *, wait_s: float | None, left_s: float, room: bool, worse: Ticket | None
    ) -> Refusal | None:
        if left_s <= 0:
            return Refusal.DEADLINE_PASSED
        if room:
            return None
        if line.full:
            return Refusal.TENANT_LIMIT
        if worse is None and self.waiting_count >= self._max_queued:
            return Refusal.TOO_MANY_TURNS if line.room > 0 else Refusal.TENANT_LIMIT
        return Refusal.DEADLINE_UNREACHABLE if wait_s is not None and wait_s > left_s else None

    def _start(self, ticket: Ticket, line: _Line, now: float) -> None:
        self._served += 1
        line.served = self._served
        line.running += 1
        self.running_count += 1
        ticket.state, ticket.started_s = State.RUNNING, now

    def _start_next(self, now: float) -> Ticket | None:
        """One slot has got free, so there is at most one."""
        if not self.waiting_count:
            return None
        able = [line for line in self._lines.values() if line.waiting and line.room > 0]
        if not able or self.running_count >= self.max_turns:
            return None
        line = min(able, key=lambda each: (-each.limits.priority, each.running, each.served))
        ticket = next(iter(line.waiting))
        self._stop_waiting(ticket, line)
        self._start(ticket, line, now)
        return ticket

    def _stop_waiting(self, ticket: Ticket, line: _Line) -> None:
        del line.waiting[ticket]
        self.waiting_count -= 1

    def _worse_than(self, line: _Line) -> Ticket | None:
        """Returns the waiting turn that has to go before one of this tenant."""
        waiting = [each for each in self._lines.values() if each.waiting]
        worst = min(waiting, key=lambda each: (each.limits.priority, -len(each.waiting)), default=None)
        if worst is None or worst.limits.priority > line.limits.priority:
            return None
        if worst.limits.priority == line.limits.priority and len(worst.waiting) <= len(line.waiting) + 1:
            return None
        return next(reversed(worst.waiting))

    def _displace(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            line = self._lines[ticket.tenant]
            self._stop_waiting(ticket, line)
            ticket.state, ticket.refusal = State.REFUSED, Refusal.DISPLACED
            self._tidy(ticket.tenant, line)

    def _tidy(self, tenant: str, line: _Line) -> None:
        if not line.running and not line.waiting:
            del self._lines[tenant]

    def _note(self, seconds: float) -> None:
        self._ended += 1
        self._mean_s += (seconds - self._mean_s) / min(self._ended, _MEMORY)

    def _wait_s(self, line: _Line) -> float | None:
        """The turn's place in line times the mean time between two slots that get free; the same within its tenant."""
        if not self._ended:
            return None
        own = len(line.waiting) + 1
        ahead = sum(_ahead(each, line) for each in self._lines.values() if each is not line)
        turns = max(0.0, ahead + own - (self.max_turns - self.running_count)) / self.max_turns
        own_turns = max(0.0, own - line.room) / (line.limits.max_turns or math.inf)
        return self._mean_s * max(turns, own_turns)


def _ahead(other: _Line, line: _Line) -> float:
    """Returns how many of another tenant's waiting turns get a slot before one that joins this line."""
    if other.limits.priority < line.limits.priority:
        return 0
    before = len(other.waiting) if other.limits.priority > line.limits.priority else len(line.waiting) + 1
    return min(before, len(other.waiting), other.room)
