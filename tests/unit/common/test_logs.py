import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul_common.logs import configure_logging, step_level
from backhaul_common.trace_context import context_from
from tests.fakes.log_lines import log_lines, logging_as_before


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    with logging_as_before():
        yield io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_event_fields_level_service_and_time(stream: io.StringIO) -> None:
    configure_logging("info", "sample", stream)
    structlog.get_logger("x").info("node joined", node_id="d1")
    structlog.get_logger("x").debug("not shown")
    (line,) = lines(stream)
    assert line["logger"] == "x"
    assert {"event": "node joined", "node_id": "d1", "level": "info", "service": "sample"}.items() <= line.items()
    assert "timestamp" in line


def test_a_line_within_a_span_names_the_trace(stream: io.StringIO, spans: InMemorySpanExporter) -> None:
    configure_logging("info", "sample", stream)
    with trace.get_tracer("t").start_as_current_span("s") as span:
        structlog.get_logger("x").info("inside")
    structlog.get_logger("x").info("outside")
    inside, outside = lines(stream)
    assert inside["trace_id"] == trace.format_trace_id(span.get_span_context().trace_id)
    assert "trace_id" not in outside


def test_libraries_and_exceptions_come_in_the_same_form(stream: io.StringIO) -> None:
    configure_logging("warning", "sample", stream)
    logging.getLogger("library").warning("odd %s", "thing")
    prompt = "the client's words"
    try:
        raise ValueError(len(prompt))
    except ValueError as error:
        structlog.get_logger("x").error("failed", exc_info=error)
    first, second = lines(stream)
    assert (first["event"], first["level"], first["service"]) == ("odd thing", "warning", "sample")
    assert "ValueError" in json.dumps(second["exception"])
    assert "words" not in stream.getvalue()


def test_what_callers_send_beside_their_trace_is_repeated_in_no_line(stream: io.StringIO) -> None:
    configure_logging("debug", "sample", stream)
    context_from({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "hunter2"})
    extract({"baggage": "hunter2"})
    assert "hunter2" not in stream.getvalue()


def test_a_terminal_gets_text(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "isatty", lambda: True)
    configure_logging("info", "sample", stream)
    try:
        raise ValueError("why")
    except ValueError as error:
        structlog.get_logger("x").error("failed", exc_info=error, node_id="d1")
    assert "failed" in stream.getvalue()
    assert "ValueError: why" in stream.getvalue()


def test_the_level_moves_by_one_at_a_time_within_its_bounds_and_says_so_whatever_it_is(stream: io.StringIO) -> None:
    configure_logging("info", "sample", stream)
    for by in (1, 1, -1, -1, -1, -1):
        step_level(by)
    assert [(line["event"], line["to"]) for line in lines(stream)] == [
        ("log level changed", level) for level in ("debug", "debug", "info", "warning", "error", "error")
    ]


def test_what_is_logged_goes_by_the_new_level_at_once(stream: io.StringIO) -> None:
    configure_logging("info", "sample", stream)
    log, library = structlog.get_logger("x"), logging.getLogger("library")
    for by in (0, 1, -1):
        step_level(by)
        log.debug("ours", step=by)
        library.debug("theirs")
    assert [line["event"] for line in lines(stream) if line["event"] != "log level changed"] == ["ours", "theirs"]


class Full(io.StringIO):
    """A stream of which the reader is gone, or the disk full."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError


class Nameless:
    """Fails whoever wants to show it."""

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("closed", [False, True])
def test_nobody_fails_by_a_line_that_cannot_be_written(stream: io.StringIO, closed: bool) -> None:
    out = stream if closed else Full()
    configure_logging("info", "sample", out)
    if closed:
        out.close()
    structlog.get_logger("x").info("turn ended")
    structlog.get_logger("x").log(logging.ERROR, "turn failed")


@pytest.mark.parametrize("field", [{b"k": 1}, {("k", 1): 1}, Nameless(), [Nameless()]])
def test_nobody_fails_by_a_field_that_json_cannot_show(stream: io.StringIO, field: object) -> None:
    configure_logging("info", "sample", stream)
    structlog.get_logger("x").info("turn ended", field=field)
    (line,) = lines(stream)
    assert line["event"] == "turn ended"
    assert "field" in line


def test_nobody_fails_by_a_field_that_holds_itself(stream: io.StringIO) -> None:
    configure_logging("info", "sample", stream)
    round_and_round: list[object] = []
    round_and_round.append(round_and_round)
    structlog.get_logger("x").info("turn ended", field=round_and_round)
    (line,) = lines(stream)
    assert line["field"] == "[[...]]"


def test_of_what_is_being_freed_nothing_is_logged(stream: io.StringIO) -> None:
    with logging_as_before():
        configure_logging("debug", "sample", stream)
        assert not logging.getLogger("grpc._cython.cygrpc").isEnabledFor(logging.DEBUG)


def test_tests_that_log_everything_leave_no_logger_that_still_does() -> None:
    library = logging.getLogger("some.library")
    with log_lines("sample"):
        assert library.isEnabledFor(logging.DEBUG)
    assert not library.isEnabledFor(logging.DEBUG)
