"""Turns whose bytes a gateway moves: what may be told of them, in which order, and by when.

    PLANNED ──sending──► SENDING ──first byte──► ANSWERING ──done, failed, left──► over
       └──failed, left──► over └──done, failed, left──► over

Nothing told by the deadline is an end, too. Reports are repeated when their answer was lost: what led to a state may be
told again in it, and an end when it is over. Nothing else may be told of a turn that is over, `sending` least of all:
the hand-off of a turn that ends while it is PLANNED is freed, and who were told to go on would read blocks that are
another's.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from backhaul_common.errors import FailedPreconditionError, NotFoundError

REMEMBER_S = 60.0
"""How long a turn's end is remembered, seconds."""
MAX_REMEMBERED = 10_000
"""Ends that are remembered; beyond that the oldest is forgotten."""

GIVEN_UP = "given_up"
"""How a turn ends of which nothing is told in time."""


class State(Enum):
    """Where a turn is."""

    PLANNED = "planned"
    """The gateway has it, and has sent nothing."""
    SENDING = "sending"
    """The engine may have it."""
    ANSWERING = "answering"
    """Something of the answer is there."""


class Step(Enum):
    """What is told."""

    SENDING = "sending"
    FIRST_BYTE = "first_byte"
    DONE = "done"
    FAILED = "failed"
    LEFT = "left"


_NEXT = {
    (State.PLANNED, Step.SENDING): State.SENDING,
    (State.SENDING, Step.FIRST_BYTE): State.ANSWERING,
}
_AGAIN = {
    (State.SENDING, Step.SENDING),
    (State.ANSWERING, Step.SENDING),
    (State.ANSWERING, Step.FIRST_BYTE),
}
_ENDS = (Step.DONE, Step.FAILED, Step.LEFT)
_NEEDS_SENDING = (Step.FIRST_BYTE, Step.DONE)


@dataclass(frozen=True, slots=True)
class Told:
    """What a report means."""

    new: bool
    """Whether it was told for the first time."""
    over: bool
    """Whether the turn is over."""
    state: State = State.PLANNED
    """Where the turn was before; of a new report."""


@dataclass(slots=True)
class _Plan:
    tenant: str
    deadline: float
    state: State = State.PLANNED


@dataclass(frozen=True, slots=True)
class _End:
    tenant: str
    how: str
    until: float


class PlanBook:
    """Keeps the state of each planned turn. Times are of one monotonic clock, seconds."""

    def __init__(self, *, send_s: float, report_s: float) -> None:
        """``send_s``: until the first report of a turn; ``report_s``: until each later one."""
        self._send_s = send_s
        self._report_s = report_s
        self._plans: dict[str, _Plan] = {}
        self._ends: OrderedDict[str, _End] = OrderedDict()

    def add(self, turn_id: str, tenant: str, now: float) -> None:
        """A turn is planned."""
        self._plans[turn_id] = _Plan(tenant, now + self._send_s)

    def tell(self, turn_id: str, tenant: str, step: Step, now: float) -> Told:
        """Takes a report.

        Raises NotFoundError (TURN_UNKNOWN), FailedPreconditionError (NOT_SENDING, TURN_OVER).
        """
        plan = self._plans.get(turn_id)
        if plan is None or plan.tenant != tenant:
            return self._told_late(turn_id, tenant, step, now)
        if plan.deadline <= now:
            # Nobody has looked yet; it must not be sent any more all the same.
            raise _over(GIVEN_UP)
        state = plan.state
        if step in _ENDS and not (state is State.PLANNED and step in _NEEDS_SENDING):
            self._end(turn_id, step.value, now)
            return Told(new=True, over=True, state=state)
        if (state, step) not in _NEXT and (state, step) not in _AGAIN:
            raise FailedPreconditionError("NOT_SENDING", "report sending first, and wait for the answer")
        plan.state = _NEXT.get((state, step), state)
        plan.deadline = now + self._report_s
        return Told(new=(state, step) in _NEXT, over=False, state=state)

    def overdue(self, now: float) -> list[str]:
        """Returns the turns of which nothing was told in time: they are over."""
        late = [turn_id for turn_id, plan in self._plans.items() if plan.deadline <= now]
        for turn_id in late:
            self._end(turn_id, GIVEN_UP, now)
        return late

    def _told_late(self, turn_id: str, tenant: str, step: Step, now: float) -> Told:
        end = self._ends.get(turn_id)
        if end is None or end.tenant != tenant or end.until <= now:
            raise NotFoundError("TURN_UNKNOWN", "this router has planned no such turn, or it has long been over")
        if end.how == step.value:
            return Told(new=False, over=True)
        raise _over(end.how)

    def _end(self, turn_id: str, how: str, now: float) -> None:
        plan = self._plans.pop(turn_id)
        self._ends[turn_id] = _End(plan.tenant, how, now + REMEMBER_S)
        while len(self._ends) > MAX_REMEMBERED or next(iter(self._ends.values())).until <= now:
            self._ends.popitem(last=False)


def _over(how: str) -> FailedPreconditionError:
    if how == GIVEN_UP:
        return FailedPreconditionError("TURN_OVER", "nothing was told of the turn in time: do not send it", how=how)
    return FailedPreconditionError("TURN_OVER", f"the turn is over: it was told to be {how}", how=how)
