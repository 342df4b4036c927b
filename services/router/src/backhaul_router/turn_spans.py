"""The spans of one turn. No prompts, completions, keys or client ids in any of them; docs/tracing.md shows them."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from backhaul_common import attributes as names
from backhaul_common.clock import Clock
from backhaul_common.errors import BackhaulError
from backhaul_common.trace_context import span_named, trace_headers, traceparent_of
from backhaul_router.core.engines import EngineError, failure_in
from backhaul_router.core.errors import ApiError
from backhaul_router.core.routing.target import Target
from backhaul_router.core.turn import Outcome, Route

_NO_TRACE = nullcontext()

_FINE = ("ok", "refused")
"""Results that are nobody's fault here: an engine's 4xx blames the client."""


class Ended:
    """Ends a span with a status that says what went wrong inside, and no more of it."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc, asyncio.CancelledError | GeneratorExit):
            _mark(self._span, "cancelled")
        elif isinstance(exc, Exception) and (not isinstance(exc, ApiError) or exc.status >= 500):
            _mark(self._span, _kind(exc))
        self._span.end()


class LegSpan(Ended):
    """The span of one leg, ended on leaving."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.headers = trace_headers(trace.set_span_in_context(span, Context())) if _traced(span) else {}
        """By which the leg's engine continues the trace."""

    def answered(self, status: int) -> None:
        """The engine has answered with an HTTP status."""
        self._span.set_attribute(names.HTTP_STATUS, status)
        failure = failure_in(status)
        if failure is not None:
            self.failed(failure.value)

    def failed(self, how: str) -> None:
        """The leg came to nothing."""
        _mark(self._span, how)


class TurnTrace:
    """The spans of one turn. They are started and ended by hand: a context must not stay attached across yields."""

    def __init__(self, tracer: trace.Tracer, span: Span, clock: Clock) -> None:
        self._tracer = tracer
        self._context = trace.set_span_in_context(span, Context())
        self._clock = clock
        self._began = clock.monotonic()
        self.span = span

    @property
    def elapsed_s(self) -> float:
        """Seconds since the turn began."""
        return self._clock.monotonic() - self._began

    @property
    def traceparent(self) -> str:
        """Names the turn to those that come after it; empty when its trace is not recorded."""
        return traceparent_of(self.span)

    def leg(self, name: str, target: Target, outcome: Outcome) -> LegSpan:
        """Spans one leg to an engine, from now until what it returns is left."""
        if not _traced(self.span):
            return LegSpan(trace.INVALID_SPAN)
        attributes = {names.NODE_ID: target.key[0], names.ENGINE_ID: target.key[1], names.ROUTE: outcome.route.value}
        return LegSpan(self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes))

    @contextmanager
    def step(self, name: str) -> Iterator[Span]:
        """Spans a step whose gRPC calls become its children; no yields of generators inside."""
        span = self._tracer.start_span(name, self._context)
        with Ended(span), _current(span):
            yield span

    def current(self) -> AbstractContextManager[object]:
        """Makes what begins inside part of the turn, in the background too; no yields of generators inside."""
        return _current(self.span)

    def told(self, step: str) -> None:
        """A gateway tells how the turn goes, by a call of its own: that is noted, and the call's span linked to it."""
        self.span.add_event(step)
        trace.get_current_span().add_link(self.span.get_span_context())


def describe(span: Span, outcome: Outcome, result: str) -> None:
    """Puts on a turn's span what became of the turn, and a link to the turn whose blocks it read."""
    if not span.is_recording():
        return
    span.set_attributes(dict(_described(outcome, result)))
    if outcome.result not in _FINE:
        _mark(span, outcome.result)
    origin = span_named(outcome.origin) if outcome.route is not Route.COLD else None
    if origin is not None:
        span.add_link(origin)


def _described(outcome: Outcome, result: str) -> Iterator[tuple[str, str | bool | int | float]]:
    yield names.ROUTE, outcome.route.value
    yield names.RESULT, result
    yield names.PROMPT_TOKENS, outcome.prompt_token_count
    yield names.LOCAL_TOKENS, outcome.local_token_count
    yield names.READ_TOKENS, outcome.read_token_count
    if outcome.prompt_token_count:
        yield names.GEN_AI_INPUT_TOKENS, outcome.prompt_token_count
        yield names.GEN_AI_CACHED_TOKENS, outcome.local_token_count + outcome.read_token_count
    if outcome.ttft_s is not None:
        yield names.GEN_AI_FIRST_CHUNK, outcome.ttft_s
    if outcome.estimate_s is not None:
        yield names.ESTIMATE, outcome.estimate_s
    if outcome.fallback:
        yield names.FALLBACK, True
    texts = {
        names.NODE_ID: outcome.node_id,
        names.SOURCE_NODE_ID: outcome.holder_id,
        names.SOURCE: outcome.source,
        names.MISS_REASON: outcome.miss,
    }
    yield from ((name, text) for name, text in texts.items() if text)


def _traced(span: Span) -> bool:
    """Tells whether a span belongs to a trace at all: where nobody traces, and no caller does, none does."""
    return span.get_span_context().is_valid


def _current(span: Span) -> AbstractContextManager[object]:
    if not _traced(span):
        return _NO_TRACE
    return trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False)


def _mark(span: Span, how: str) -> None:
    span.set_attribute(names.ERROR_TYPE, how)
    span.set_status(Status(StatusCode.ERROR, how))


def _kind(error: Exception) -> str:
    if isinstance(error, EngineError):
        return error.failure.value
    if isinstance(error, BackhaulError):
        return error.reason
    return str(error.status) if isinstance(error, ApiError) else type(error).__name__
