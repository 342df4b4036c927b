"""Reads that come while others are on their way to etcd go there together."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass

from backhaul_common.errors import UnavailableError
from backhaul_common.etcd.ops import Get, KeyValue

PATIENCE_S = 0.01
"""How long reads wait for the transaction before theirs: longer than etcd takes when it is well."""

MAX_AT_ONCE = 4
"""Transactions on their way, each sent after the patience with the one before was over."""

MAX_GETS = 100
"""Gets of one transaction; etcd's own limit is 128 by default (server/embed/config.go, DefaultMaxTxnOps)."""

MAX_WAITING = 1_000
"""Reads that wait for their turn. One more fails at once."""

Reads = tuple[tuple[KeyValue, ...], ...]
"""What each Get found, in order."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a transaction read."""

    revision: int
    reads: Reads


Send = Callable[[Sequence[Get], float], Awaitable[Result]]
"""Makes one transaction, within these seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    gets: Sequence[Get]
    until: float
    """By the event loop's clock."""
    answer: "asyncio.Future[Result]"
    context: Context
    """Whose read it is: etcd is told the trace of the first one."""


class GatheredReads:
    """Sends reads in as few transactions as keep up with them: those that come while one is on its way are the next.

    A call of etcd costs its caller more than what it reads: many at a time are cheaper, and come sooner, as one. Each
    begins after the reads in it were asked for, so each of them is as new as alone.
    """

    def __init__(self, send: Send) -> None:
        """What `send` raises is raised by all reads that it was for."""
        self._send = send
        self._waiting: deque[_Waiting] = deque()
        self._running_count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._patience: asyncio.TimerHandle | None = None
        """Ends the wait of those who wait now."""

    async def read(self, gets: Sequence[Get], timeout_s: float) -> Result:
        """Returns what the gets find.

        Raises what `send` raises, TimeoutError after ``timeout_s`` seconds without an answer, UnavailableError
        (ETCD_BUSY) when too many wait. Cancellation leaves alone what others wait for.
        """
        if not self._running_count:
            return await self._run(gets, timeout_s)
        if len(self._waiting) >= MAX_WAITING:
            raise UnavailableError("ETCD_BUSY", f"{MAX_WAITING} reads wait for etcd: it does not keep up")
        waiting = self._enqueue(gets, timeout_s)
        try:
            async with asyncio.timeout_at(waiting.until):
                return await waiting.answer
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    async def close(self) -> None:
        """Ends what waits."""
        while self._waiting:
            self._waiting.popleft().answer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enqueue(self, gets: Sequence[Get], timeout_s: float) -> _Waiting:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(gets, loop.time() + timeout_s, loop.create_future(), copy_context())
        self._waiting.append(waiting)
        if self._patience is None:
            self._patience = loop.call_later(PATIENCE_S, self._start_next)
        return waiting

    async def _run(self, gets: Sequence[Get], timeout_s: float) -> Result:
        self._running_count += 1
        try:
            return await self._send(gets, timeout_s)
        finally:
            self._running_count -= 1
            self._start_next()

    def _start_next(self) -> None:
        """Sends what waits: the transaction before has ended, or the patience with it has."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._running_count >= MAX_AT_ONCE or not (together := self._next()):
            return
        task = asyncio.create_task(self._run_together(together), context=together[0].context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._waiting:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._start_next)

    def _next(self) -> list[_Waiting]:
        """Takes from those who still wait as many as fit into one transaction, oldest first."""
        together: list[_Waiting] = []
        room = MAX_GETS
        while self._waiting and (len(self._waiting[0].gets) <= room or not together):
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                together.append(waiting)
                room -= len(waiting.gets)
        return together

    async def _run_together(self, together: Sequence[_Waiting]) -> None:
        gets = [get for waiting in together for get in waiting.gets]
        left_s = max(waiting.until for waiting in together) - asyncio.get_running_loop().time()
        try:
            result = await self._run(gets, left_s)
        except asyncio.CancelledError:
            for waiting in together:
                waiting.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # the task border: it is raised by each read
            _fail(together, error)
            return
        start = 0
        for waiting in together:
            end = start + len(waiting.gets)
            if not waiting.answer.done():
                waiting.answer.set_result(Result(result.revision, result.reads[start:end]))
            start = end


def _fail(together: Sequence[_Waiting], error: Exception) -> None:
    for waiting in together:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
            # Whoever it is for may be gone in this very moment.
            waiting.answer.exception()
