"""How much the router takes on at once. What is beyond that waits if it may, or is refused at once, with a reason."""

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

import structlog

from backhaul_common.clock import Clock
from backhaul_common.metering import Counter, Histogram, observe
from backhaul_router import instruments
from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import Refusal, State, TenantLimits, Ticket, TurnQueue

_log = structlog.get_logger(__name__)

MAX_LISTS = 32
"""Model lists and explanations at once; the former ask every engine, the latter look at all of them."""

MAX_ENDINGS = 256
"""Conversations that are being ended at once; each asks the registry several times."""

_LOG_EVERY_S = 10.0
_LONGEST_RETRY_S = 60
"""OpenAI's clients do not try again when it is more than 120 (openai/_constants.py, MAX_RETRY_AFTER_DELAY)."""

_STATUS = {Refusal.DEADLINE_UNREACHABLE: 503, Refusal.DEADLINE_PASSED: 504, Refusal.QUEUE_TIMEOUT: 503}
"""Of all others 429."""


class Admission:
    """Counts what runs and the bytes of the bodies it holds, over HTTP and gRPC together."""

    def __init__(self, *, turns: TurnQueue, queue_timeout_s: float, max_held_bytes: int, clock: Clock) -> None:
        self._turns = turns
        self._queue_timeout_s = queue_timeout_s
        self._max_held_bytes = max_held_bytes
        self._clock = clock
        self._woken: dict[Ticket, asyncio.Future[None]] = {}
        """Of each turn that waits: done when it need not any more."""
        self._list_count = 0
        self._ending_count = 0
        self._held_bytes = 0
        self._logged_s = -math.inf
        observe(instruments.RUNNING_TURNS, lambda: {(): self.turn_count})
        observe(instruments.QUEUED_TURNS, lambda: {(): self.queued_count})
        observe(instruments.HELD_BODIES, lambda: {(): self.held_bytes})
        self._waits = Histogram(instruments.QUEUE_WAIT)
        self._refusals = Counter(instruments.REFUSALS)

    @property
    def turn_count(self) -> int:
        """Turns that run."""
        return self._turns.running_count

    @property
    def queued_count(self) -> int:
        """Turns that wait."""
        return self._turns.waiting_count

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies that turns hold."""
        return self._held_bytes

    def turn(self, tenant: str = "", *, left_s: float = math.inf, byte_count: int = 0) -> "Admitted":
        """Returns what counts one turn in, at once or after a wait, and out again on leaving, with all that it held.

        ``left_s`` is how long its client goes on waiting, seconds; ``byte_count`` what it holds already, even while
        it waits. Entering raises ApiError (429, 503, 504). Cancelling while it waits frees its place in the queue.
        """
        return Admitted(self, tenant, left_s, byte_count)

    async def enter(self, tenant: str, left_s: float) -> Ticket:
        """Counts one turn in. Raises ApiError, and counts nothing, when it may not run; so does cancelling."""
        ticket = self._enter(tenant, left_s)
        if ticket.state is State.WAITING:
            try:
                await self._wait(ticket, left_s)
            except BaseException:
                self.leave(ticket)
                raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Counts it out."""
        self._wake(self._turns.leave(ticket, now=self._clock.monotonic()))

    @contextmanager
    def listing(self, byte_count: int = 0) -> Iterator[None]:
        """Counts one model list or explanation, and the bytes of its body. Raises ApiError (429)."""
        if self._list_count >= MAX_LISTS:
            what = f"{MAX_LISTS} model lists and explanations run on this router"
            raise self._too_much("too_many_lists", what, MAX_LISTS)
        self.hold(byte_count)
        self._list_count += 1
        try:
            yield
        finally:
            self._list_count -= 1
            self.let_go(byte_count)

    @contextmanager
    def ending(self, byte_count: int = 0) -> Iterator[None]:
        """Counts one conversation that is being ended, and the bytes of its body. Raises ApiError (429)."""
        if self._ending_count >= MAX_ENDINGS:
            what = f"{MAX_ENDINGS} conversations are being ended by this router"
            raise self._too_much("too_many_endings", what, MAX_ENDINGS)
        self.hold(byte_count)
        self._ending_count += 1
        try:
            yield
        finally:
            self._ending_count -= 1
            self.let_go(byte_count)

    def limit(self, limits: Mapping[str, TenantLimits]) -> None:
        """Changes what tenants may have. No turn ends or loses its place by it, and some may run that waited."""
        for ticket in self._turns.limit(limits, now=self._clock.monotonic()):
            self._wake(ticket)

    def hold(self, byte_count: int) -> None:
        """Counts bytes in. Raises ApiError (429), and counts nothing, when that is too much."""
        limit = self._max_held_bytes
        if self._held_bytes + byte_count > limit:
            raise self._too_much("too_many_bytes", f"request bodies of {limit} bytes are held by this router", limit)
        self._held_bytes += byte_count

    def let_go(self, byte_count: int) -> None:
        """Counts them out."""
        self._held_bytes -= byte_count

    def _enter(self, tenant: str, left_s: float) -> Ticket:
        now = self._clock.monotonic()
        entry = self._turns.enter(tenant, now=now, deadline=now + left_s)
        self._wake(entry.displaced)
        if entry.ticket.refusal is not None:
            raise self._refused(entry.ticket.refusal, entry.wait_s)
        return entry.ticket

    async def _wait(self, ticket: Ticket, left_s: float) -> None:
        """Returns when the turn runs. Raises ApiError when it may not wait any longer."""
        began, result = self._clock.monotonic(), "left"
        self._woken[ticket] = asyncio.get_running_loop().create_future()
        try:
            await self._woken_within(self._woken[ticket], min(left_s, self._queue_timeout_s))
            result = "late" if ticket.state is State.WAITING else ticket.state.value
        finally:
            del self._woken[ticket]
            self._waits.record(self._clock.monotonic() - began, result)
        if ticket.state is State.WAITING:
            late = Refusal.DEADLINE_PASSED if left_s <= self._queue_timeout_s else Refusal.QUEUE_TIMEOUT
            raise self._refused(late, self._turns.wait_s(ticket.tenant))
        if ticket.refusal is not None:
            raise self._refused(ticket.refusal, self._turns.wait_s(ticket.tenant))

    async def _woken_within(self, woken: asyncio.Future[None], seconds: float) -> None:
        late = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait((woken, late), return_when=asyncio.FIRST_COMPLETED)
        finally:
            late.cancel()

    def _wake(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._woken[ticket].set_result(None)

    def _refused(self, refusal: Refusal, wait_s: float | None) -> ApiError:
        what = self._reason(refusal)
        return self._refusal(_STATUS.get(refusal, 429), refusal.value, what, self._turns.max_turns, wait_s)

    def _reason(self, refusal: Refusal) -> str:
        full = f"{self._turns.max_turns} turns run on this router, which is its limit"
        match refusal:
            case Refusal.TENANT_LIMIT:
                return "your tenant has as many turns on this router as it may have, which is its limit"
            case Refusal.TOO_MANY_TURNS:
                return full
            case Refusal.DISPLACED:
                return f"{full}, and another turn was let in before this one"
            case Refusal.DEADLINE_UNREACHABLE:
                return "the turn would wait here for longer than its deadline allows"
            case Refusal.DEADLINE_PASSED:
                return "the deadline passed before the turn began"
            case Refusal.QUEUE_TIMEOUT:
                return f"the turn waited for {self._queue_timeout_s:g} s, which is this router's limit"

    def _too_much(self, code: str, what: str, limit: int) -> ApiError:
        return self._refusal(429, code, f"{what}, which is its limit", limit)

    def _refusal(self, status: int, code: str, what: str, limit: int, retry_s: float | None = None) -> ApiError:
        self._refusals.add(1, code)
        now = self._clock.monotonic()
        if now - self._logged_s >= _LOG_EVERY_S:
            # Refusals come in thousands, and say all the same.
            self._logged_s = now
            _log.warning("refusing requests", reason=code, limit=limit)
        seconds = max(1, min(_LONGEST_RETRY_S, math.ceil(retry_s or 0)))
        message = f"{what}; try again in {'a moment' if seconds == 1 else f'{seconds} s'}"
        return ApiError(status, message, code=code, headers={"retry-after": str(seconds)})


class Admitted:
    """Counts one turn while it is entered."""

    __slots__ = ("_admission", "_byte_count", "_held", "_left_s", "_tenant", "_ticket")

    def __init__(self, admission: Admission, tenant: str, left_s: float, byte_count: int) -> None:
        self._admission = admission
        self._tenant = tenant
        self._left_s = left_s
        self._byte_count = byte_count

    async def __aenter__(self) -> "Held":
        self._held = Held(self._admission)
        self._held.grow(self._byte_count)
        try:
            self._ticket = await self._admission.enter(self._tenant, self._left_s)
        except BaseException:
            self._admission.let_go(self._held.byte_count)
            raise
        return self._held

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._admission.let_go(self._held.byte_count)
        self._admission.leave(self._ticket)


class Held:
    """What one turn holds."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.byte_count = 0

    def grow(self, byte_count: int) -> None:
        """Holds more bytes. Raises ApiError (429)."""
        self._admission.hold(byte_count)
        self.byte_count += byte_count
