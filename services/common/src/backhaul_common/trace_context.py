"""W3C trace context as text: what calls that no interceptor sees carry along, and what names a turn for a link."""

import re

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_propagator = TraceContextTextMapPropagator()


def context_from(carrier: dict[str, str]) -> Context:
    """Returns the caller's trace context from lower-case headers; a fresh one when it is missing or malformed."""
    return _propagator.extract(carrier, context=Context())


def trace_headers(context: Context | None = None) -> dict[str, str]:
    """Returns the headers that continue a trace, by default the current one; none outside a trace."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, context=context)
    return headers


def traceparent_of(span: Span) -> str:
    """Returns the name of a span that is recorded, as `traceparent` has it; empty for one that nobody will see."""
    if not (span.is_recording() and span.get_span_context().trace_flags.sampled):
        return ""
    return trace_headers(set_span_in_context(span, Context()))["traceparent"]


def checked_traceparent(text: str) -> str:
    """Returns a name of a span as it is; empty in place of anything else."""
    return text if _TRACEPARENT.fullmatch(text) else ""


def span_named(traceparent: str) -> SpanContext | None:
    """Returns the span that a name is of; None for anything else."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    trace_id, span_id = (int(part, 16) for part in found.groups())
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return context if context.is_valid else None
