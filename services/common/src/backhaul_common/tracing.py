"""Tracing interceptors: OpenTelemetry's own, with their weak points in asyncio mended.

Long-lived streams get no span (it would end hours later), neither do health and reflection.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.instrumentation.grpc._aio_client import (
    UnaryStreamAioClientInterceptor,
    UnaryUnaryAioClientInterceptor,
)
from opentelemetry.instrumentation.grpc._aio_server import (
    OpenTelemetryAioServerInterceptor,
    _OpenTelemetryAioServicerContext,
)
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from backhaul_common.attributes import RPC_GRPC_STATUS_CODE, RPC_METHOD, RPC_SERVICE, RPC_SYSTEM
from backhaul_common.trace_context import context_from

LONG_LIVED = frozenset(
    {"JoinNode", "WatchNodes", "PublishBlockSets", "WatchBlockSets", "WatchLoad", "Process", "StreamAccessLogs"}
)
"""Methods whose streams stay open for as long as the caller lives, or the request that they accompany."""


def traced(call_details: Any) -> bool:
    """Tells whether a call gets a span."""
    name = _text(call_details.method)
    return not name.startswith("/grpc.") and name.rpartition("/")[2] not in LONG_LIVED


def server_interceptor() -> grpc.aio.ServerInterceptor:
    """Returns the interceptor that continues the caller's trace with a server span."""
    interceptor: grpc.aio.ServerInterceptor = _ServerInterceptor(_tracer(), filter_=_seen)
    return interceptor


def client_interceptors() -> Sequence[grpc.aio.ClientInterceptor]:
    """Returns the interceptors that send the current trace along, with a client span for calls without streams."""
    return (_UnaryClientInterceptor(_tracer(), filter_=traced), _StreamClientInterceptor(_tracer(), filter_=traced))


def _tracer() -> trace.Tracer:
    return trace.get_tracer("backhaul_common.grpc")


def _seen(call_details: Any) -> bool:
    """Tells whether a call that a server gets needs a span: while nobody records any, only to pass on its caller's."""
    return traced(call_details) and (_recorded() or _part_of_trace(call_details))


def _recorded() -> bool:
    # What there is until an SDK is set up (opentelemetry-api, trace/__init__.py, ``get_tracer_provider``).
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _part_of_trace(call_details: Any) -> bool:
    return any(key == "traceparent" for key, _ in call_details.invocation_metadata)


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method


class _ServerInterceptor(OpenTelemetryAioServerInterceptor):
    """Takes of the caller its trace and nothing else, and puts into the span neither the caller's words nor errors'.

    The base passes on what the caller sends as baggage, and records exceptions with all that led to them.

    Keeps the span out of the context while a stream is suspended. The base attaches it across ``yield``; when gRPC
    drops the generator of a cancelled stream, it is closed in another context and detaching fails
    (opentelemetry-python-contrib#2357).
    """

    def _intercept_aio_server_unary(self, behavior: Any, handler_call_details: Any) -> Any:
        async def unary(request: Any, context: Any) -> Any:
            span = self._span(_text(handler_call_details.method), context)
            with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
                return await behavior(request, _CodeInSpan(context, span))

        return unary

    def _intercept_aio_server_stream(self, behavior: Any, handler_call_details: Any) -> Any:
        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            span = self._span(_text(handler_call_details.method), context)
            current = trace.set_span_in_context(span)
            responses = behavior(request, _CodeInSpan(context, span))
            try:
                async for response in _within(current, responses):
                    yield response
            except asyncio.CancelledError:
                span.set_status(Status(StatusCode.ERROR, "cancelled"))
                raise
            finally:
                await responses.aclose()
                span.end()

        return stream

    def _span(self, path: str, context: Any) -> Span:
        service, _, method = path.lstrip("/").partition("/")
        attributes = {RPC_SYSTEM: "grpc", RPC_SERVICE: service, RPC_METHOD: method}
        caller = context_from({key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
        span: Span = self._tracer.start_span(path, context=caller, kind=SpanKind.SERVER, attributes=attributes)
        return span


class _CodeInSpan(_OpenTelemetryAioServicerContext):
    """Puts into the span how a call ended, without the words: an engine may have repeated a prompt in them."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Any:
        self.set_code(code)
        return await self.__wrapped__.abort(code, details, trailing_metadata)

    def set_details(self, details: str) -> None:
        self.__wrapped__.set_details(details)


async def _within(current: otel_context.Context, responses: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yields ``responses``, each computed with ``current`` as the context."""
    while True:
        token = otel_context.attach(current)
        try:
            response = await anext(responses)
        except StopAsyncIteration:
            return
        finally:
            otel_context.detach(token)
        yield response


class _UnaryClientInterceptor(UnaryUnaryAioClientInterceptor):
    """Ends the call and its span when the caller is cancelled, which the base leaves to the garbage collector."""

    async def _wrap_unary_response(self, continuation: Any, span: Span) -> Any:
        call = await continuation()
        try:
            code = await call.code()
            span.set_attribute(RPC_GRPC_STATUS_CODE, code.value[0])
            if code is not grpc.StatusCode.OK:
                span.set_status(Status(StatusCode.ERROR, await call.details()))
        except asyncio.CancelledError:
            call.cancel()
            span.set_status(Status(StatusCode.ERROR, "cancelled"))
            raise
        finally:
            span.end()
        return call


class _StreamClientInterceptor(UnaryStreamAioClientInterceptor):
    """Sends the trace along without a span of its own, so that there is none to end when a stream is dropped."""

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        if self.tracing_skipped(client_call_details):
            return await continuation(client_call_details, request)
        return await continuation(self.propagate_trace_in_details(client_call_details), request)
