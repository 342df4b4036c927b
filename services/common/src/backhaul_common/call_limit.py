"""Server interceptor that bounds what runs at once."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from backhaul_common import metering
from backhaul_common.errors import ResourceExhaustedError
from backhaul_common.handlers import Context, Handler, preceded
from backhaul_common.instruments import REFUSED_CALLS

MAX_CHECKS = 500
"""Health checks that a server runs at once. Each takes a moment: more only come from who sends none to its end."""

MAX_WATCHES = 250
"""Watches of health and streams of reflection at once."""


class CallLimitInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls beyond a limit at once, as ResourceExhaustedError (TOO_MANY_CALLS).

    Calls with one answer and calls that stream theirs are counted apart, so that streams that stay open never shut out
    short calls; so are checks of health, and watches of it and reflection, which neither shut calls out nor are shut
    out by them. A call counts from its first byte on, be its request still on its way or its turn still to come; the
    refused do not wait for theirs. Goes inside the interceptor that maps errors.
    """

    def __init__(self, max_calls: int) -> None:
        self._limits = {"calls": max_calls, "streams": max_calls, "checks": MAX_CHECKS, "watches": MAX_WATCHES}
        self._running: Counter[str] = Counter()
        self._refusals = metering.Counter(REFUSED_CALLS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Counts one call, or wraps its handler in a refusal. None, of an unknown method, is answered UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = _kind(handler_call_details.method, streaming=bool(handler.response_streaming))
        if self._running[kind] < self._limits[kind]:
            self._count(kind)
            return handler
        return preceded(handler, self._refusal(kind), request_streaming=True)

    def _count(self, kind: str) -> None:
        # A call's task begins with the interceptors and ends with the answer (`_handle_rpc` in grpc's
        # _cython/_cygrpc/aio/server.pyx.pxi): a call that waits for its request, or for the loop, runs as well.
        task = asyncio.current_task()
        assert task is not None
        self._running[kind] += 1
        task.add_done_callback(lambda _: self._running.subtract((kind,)))

    def _refusal(self, kind: str) -> Callable[[Any, Context], Awaitable[NoReturn]]:
        limit = self._limits[kind]

        async def refuse(_request: Any, _context: Context) -> NoReturn:
            self._refusals.add(1, kind)
            message = f"{limit} {kind} run on this server, which is its limit; try again in a moment"
            raise ResourceExhaustedError("TOO_MANY_CALLS", message, limit=str(limit))

        return refuse


def _kind(method: str, *, streaming: bool) -> str:
    if method.startswith("/grpc."):
        return "watches" if streaming else "checks"
    return "streams" if streaming else "calls"
