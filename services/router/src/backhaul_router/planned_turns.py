"""Turns that were planned for gateways, from the plan to the last report."""

import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import FailedPreconditionError, InvalidArgumentError
from backhaul_router.admission import Admission
from backhaul_router.core.engines import Failure
from backhaul_router.core.plans import PlanBook, State, Step, Told
from backhaul_router.forwarding import Forwarded
from backhaul_router.ports import TurnRequest
from backhaul_router.turns import Turns

_log = structlog.get_logger(__name__)

_LOOK_S = 0.5
"""Between two looks for turns of which nothing is told, seconds."""
_ID_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Report:
    """How a turn goes."""

    step: Step
    after_s: float = 0.0
    """With `first_byte`: since the leg was sent, seconds."""
    failure: Failure | None = None
    """With `failed`: the engine's fault; None when the request was at fault."""
    status: int = 503
    """With `failed`: the engine's status."""


@dataclass(slots=True)
class _Planned:
    forwarded: Forwarded
    stack: AsyncExitStack
    sent_at: float = 0.0


class PlannedTurns:
    """Holds what each turn has on this router until it is over. Leaving the context ends all of them."""

    def __init__(self, *, turns: Turns, admission: Admission, clock: Clock, send_s: float, report_s: float) -> None:
        """``send_s``, ``report_s``: until the first report of a turn, and each later one, seconds."""
        self._turns = turns
        self._admission = admission
        self._clock = clock
        self.send_s = send_s
        self.report_s = report_s
        self._router_id = uuid.uuid4().hex
        """New at every start: whoever restarted knows none of its turns."""
        self._book = PlanBook(send_s=send_s, report_s=report_s)
        self._planned: dict[str, _Planned] = {}
        self._steps: dict[Step, Callable[[_Planned, Report, Told], None]] = {
            Step.SENDING: self._sending,
            Step.FIRST_BYTE: self._first_byte,
            Step.DONE: self._done,
            Step.FAILED: self._failed,
            Step.LEFT: self._left,
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for turn_id in list(self._planned):
            await self._give_up(turn_id)

    async def plan(self, request: TurnRequest, *, left_s: float) -> tuple[str, Forwarded]:
        """Runs a turn up to its decode leg; returns its id, and what is to be sent.

        ``left_s``: how long the caller waits, seconds. Raises ApiError. Cancelling ends all that runs for it.
        """
        async with AsyncExitStack() as stack:
            admitted = self._admission.turn(request.tenant, left_s=left_s, byte_count=len(request.body))
            await stack.enter_async_context(admitted)
            forwarded = await stack.enter_async_context(self._turns.forward(request))
            turn_id = f"{self._router_id}.{uuid.uuid4().hex}"
            self._planned[turn_id] = _Planned(forwarded, stack.pop_all())
            self._book.add(turn_id, request.tenant, self._clock.monotonic())
        return turn_id, forwarded

    async def report(self, turn_id: str, tenant: str, report: Report) -> bool:
        """Takes a report. Tells whether the turn is over.

        Raises InvalidArgumentError (TURN_ID), NotFoundError, FailedPreconditionError.
        """
        self._check(turn_id)
        told = self._book.tell(turn_id, tenant, report.step, self._clock.monotonic())
        if told.new:
            self._planned[turn_id].forwarded.told(report.step.value)
            self._steps[report.step](self._planned[turn_id], report, told)
            if told.over:
                await self._planned.pop(turn_id).stack.aclose()
        return told.over

    async def watch(self) -> None:
        """Gives up turns of which nothing is told, until cancelled."""
        while True:
            await self._clock.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Gives up the turns of which nothing was told in time."""
        late = self._book.overdue(self._clock.monotonic())
        for turn_id in late:
            await self._give_up(turn_id)
        if late:
            _log.warning("planned turns given up", turn_count=len(late), reason="nothing was reported in time")

    async def _give_up(self, turn_id: str) -> None:
        planned = self._planned.pop(turn_id)
        planned.forwarded.given_up()
        await planned.stack.aclose()

    def _check(self, turn_id: str) -> None:
        router_id, _, name = turn_id.partition(".")
        if not (_hex(router_id) and _hex(name)):
            raise InvalidArgumentError("TURN_ID", "turn_id must be the one that PlanTurn returned")
        if router_id != self._router_id:
            message = "another router planned this turn, or this one before it restarted: report to who planned it"
            raise FailedPreconditionError("OTHER_ROUTER", message)

    # What reports mean

    def _sending(self, planned: _Planned, report: Report, told: Told) -> None:
        planned.sent_at = self._clock.monotonic()
        planned.forwarded.taken()

    def _first_byte(self, planned: _Planned, report: Report, told: Told) -> None:
        forwarded = planned.forwarded
        forwarded.answered(200, None, served="", streams=forwarded.asks_for_stream, whole=False)
        # More than what is known to have passed cannot have.
        forwarded.began(min(report.after_s, self._clock.monotonic() - planned.sent_at))

    def _done(self, planned: _Planned, report: Report, told: Told) -> None:
        if told.state is State.SENDING:
            planned.forwarded.answered(200, None, served="", streams=False, whole=False)
        planned.forwarded.ended()

    def _failed(self, planned: _Planned, report: Report, told: Told) -> None:
        if told.state is State.ANSWERING:
            planned.forwarded.broken()
        else:
            planned.forwarded.answered(report.status, report.failure, served="", streams=False, whole=False)

    def _left(self, planned: _Planned, report: Report, told: Told) -> None:
        planned.forwarded.left()


def _hex(text: str) -> bool:
    return len(text) == _ID_DIGITS and all(letter in "0123456789abcdef" for letter in text)
