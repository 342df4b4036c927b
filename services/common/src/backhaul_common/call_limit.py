"""Server interceptor that bounds what runs at once."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from backhaul_common import metering
from backhaul_common.errors import ResourceExhaustedError
from backhaul_common.instruments import REFUSED_CALLS

_WAYS = {False: "unary", True: "stream"}


class CallLimitInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls beyond a limit at once, as ResourceExhaustedError (TOO_MANY_CALLS).

    Calls with one answer and calls that stream theirs are counted apart, so that streams that stay open never shut out
    short calls. A call counts from its first byte on, be its request still on its way or its turn still to come. Health
    checks and reflection are always answered. Goes inside the interceptor that maps errors.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._running: Counter[bool] = Counter()
        self._refusals = metering.Counter(REFUSED_CALLS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Counts one call, or wraps its handler in a refusal. None, of an unknown method, is answered UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        streaming = bool(handler.response_streaming)
        if self._running[streaming] < self._max_calls:
            self._count(streaming)
            return handler
        takes, gives = _WAYS[bool(handler.request_streaming)], _WAYS[streaming]
        refusing: grpc.RpcMethodHandler[Any, Any] = getattr(grpc, f"{takes}_{gives}_rpc_method_handler")(
            self._refusal(streaming),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return refusing

    def _count(self, streaming: bool) -> None:
        # A call's task begins with the interceptors and ends with the answer (`_handle_rpc` in grpc's
        # _cython/_cygrpc/aio/server.pyx.pxi): a call that waits for its request, or for the loop, runs as well.
        task = asyncio.current_task()
        assert task is not None
        self._running[streaming] += 1
        task.add_done_callback(lambda _: self._running.subtract((streaming,)))

    def _refusal(self, streaming: bool) -> Any:
        kind = "streams" if streaming else "calls"

        async def refuse(request: Any, context: Any) -> Any:
            self._refusals.add(1, kind)
            message = f"{self._max_calls} {kind} run on this server, which is its limit; try again in a moment"
            raise ResourceExhaustedError("TOO_MANY_CALLS", message, limit=str(self._max_calls))

        return refuse
