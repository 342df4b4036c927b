"""Server interceptor that bounds what runs at once."""

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from opentelemetry import metrics

from backhaul_common.errors import ResourceExhaustedError

_WAYS = {False: "unary", True: "stream"}


class CallLimitInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls beyond a limit at once, as ResourceExhaustedError (TOO_MANY_CALLS).

    Calls with one answer and calls that stream theirs are counted apart, so that streams that stay open never shut out
    short calls. Health checks and reflection are always answered. Goes inside the interceptor that maps errors.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._running: Counter[bool] = Counter()
        self._refusals = metrics.get_meter("backhaul_common").create_counter(
            "backhaul.grpc.refused_calls", description="Calls refused because too many were running"
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            # None makes gRPC answer UNIMPLEMENTED; its typing does not know.
            return handler  # type: ignore[return-value]
        takes, gives = _WAYS[handler.request_streaming], _WAYS[handler.response_streaming]
        behavior = getattr(handler, f"{takes}_{gives}")
        wrap = self._stream if inspect.isasyncgenfunction(behavior) else self._unary
        wrapped: grpc.RpcMethodHandler[Any, Any] = getattr(grpc, f"{takes}_{gives}_rpc_method_handler")(
            wrap(behavior, handler.response_streaming),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    def _unary(self, behavior: Any, streaming: bool) -> Any:
        async def call(request: Any, context: Any) -> Any:
            with self._counted(streaming):
                return await behavior(request, context)

        return call

    def _stream(self, behavior: Any, streaming: bool) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._counted(streaming):
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response

        return call

    @contextmanager
    def _counted(self, streaming: bool) -> Iterator[None]:
        if self._running[streaming] >= self._max_calls:
            kind = "streams" if streaming else "calls"
            self._refusals.add(1, {"kind": kind})
            message = f"{self._max_calls} {kind} run on this server, which is its limit; try again in a moment"
            raise ResourceExhaustedError("TOO_MANY_CALLS", message, limit=str(self._max_calls))
        self._running[streaming] += 1
        try:
            yield
        finally:
            self._running[streaming] -= 1
