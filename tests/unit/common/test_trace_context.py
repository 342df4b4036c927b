"""What names a span, and what continues its trace."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from backhaul_common.trace_context import (
    checked_traceparent,
    context_from,
    span_named,
    trace_headers,
    traceparent_of,
)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_recorded_span_is_found_by_its_name(spans: InMemorySpanExporter) -> None:
    with trace.get_tracer("test").start_as_current_span("turn") as span:
        name = traceparent_of(span)
    found = span_named(name)
    assert found is not None
    assert (found.trace_id, found.span_id) == (span.get_span_context().trace_id, span.get_span_context().span_id)
    assert checked_traceparent(name) == name


def test_a_span_that_nobody_will_see_has_no_name() -> None:
    unsampled = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test").start_span("turn")
    passed_on = trace.NonRecordingSpan(
        trace.get_current_span(context_from({"traceparent": TRACEPARENT})).get_span_context()
    )
    assert [traceparent_of(span) for span in (unsampled, passed_on, trace.INVALID_SPAN)] == ["", "", ""]


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", f"{TRACEPARENT}\n", TRACEPARENT.upper(), TRACEPARENT.replace("00-", "01-", 1), TRACEPARENT[:-1]],
    ids=repr,
)
def test_anything_else_names_no_span(text: str) -> None:
    assert (checked_traceparent(text), span_named(text)) == ("", None)


def test_ids_that_mean_none_name_no_span() -> None:
    assert span_named(f"00-{'0' * 32}-b7ad6b7169203331-01") is None


def test_a_trace_is_continued_by_headers_and_outside_one_there_are_none() -> None:
    parent = context_from({"traceparent": TRACEPARENT, "tracestate": "vendor=x"})
    assert trace_headers(parent) == {"traceparent": TRACEPARENT, "tracestate": "vendor=x"}
    assert trace_headers() == {}
