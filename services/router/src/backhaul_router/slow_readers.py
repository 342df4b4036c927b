"""Clients of gRPC streams that do not read."""

import asyncio
import contextlib
from typing import Any

import grpc

from backhaul_common.errors import ResourceExhaustedError
from backhaul_common.metering import Counter
from backhaul_common.status import to_status
from backhaul_router import instruments
from backhaul_router.patience import Patience


class SlowReaders:
    """Ends calls whose client does not take what it was sent.

    gRPC holds a response back until its client has room for it. Cancelling the handler is all that ends it then, and
    gRPC would leave a client that reads on without a status: so the status is queued first.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ending: set[asyncio.Task[None]] = set()
        self._drops = Counter(instruments.DROPPED_CALLS)

    def watched(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Patience:
        """Returns what is told when a response is yielded, and when it was taken; the call ends if that takes too long.

        To be entered by the call's handler.
        """
        handler = asyncio.current_task()
        assert handler is not None
        return Patience(self._limit_s, lambda _: self._end(handler, context), asyncio.get_running_loop())

    def _end(self, handler: "asyncio.Task[object]", context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        self._drops.add(1)
        # It is done when the client has read, or is gone; the server's end ends it too.
        task = asyncio.ensure_future(self._send_status(context))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        asyncio.get_running_loop().call_soon(handler.cancel)

    async def _send_status(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        error = ResourceExhaustedError("SLOW_READER", f"the client took nothing for {self._limit_s:g} s")
        status = to_status(error)
        # Who is gone cannot be told: then it is an InternalError.
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            await context.abort(status.code, status.details, status.trailing_metadata)
