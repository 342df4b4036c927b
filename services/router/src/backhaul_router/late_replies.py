"""Replies that come just after whoever waited for them has left."""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from backhaul_router.core.engines import EngineError, Reply

READ_ON_S = 0.25
"""How much longer a request runs whose caller has left. Engines abort requests whose connection closes, but one that
has just finished keeps blocks under a name that only its reply tells."""


class LateReplies:
    """Lets requests end that nobody waits for any more: soon, and no more than ``limit`` of them at once.

    Enter it inside the event loop that uses it; leaving ends what still runs.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left: set[asyncio.Task[Reply]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._left:
            task.cancel()
        if self._left:
            await asyncio.wait(self._left)

    async def reply(
        self, request: Coroutine[Any, Any, Reply], late: Callable[[Reply], None], *, sent: Callable[[], bool]
    ) -> Reply:
        """Returns what ``request`` does; when cancelled, ``late`` may be called with it afterwards.

        A request that is not ``sent`` by then never is.
        """
        task = asyncio.ensure_future(request)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not sent():
                task.cancel()
            self._leave(task, late)
            raise

    def _leave(self, task: asyncio.Task[Reply], late: Callable[[Reply], None]) -> None:
        def ended(_: asyncio.Task[Reply]) -> None:
            self._left.discard(task)
            timer.cancel()
            if not task.cancelled() and not isinstance(error := task.exception(), EngineError):
                if error is not None:
                    raise error
                late(task.result())

        within = READ_ON_S if len(self._left) < self._limit else 0.0
        timer = asyncio.get_running_loop().call_later(within, task.cancel)
        self._left.add(task)
        task.add_done_callback(ended)
