"""What is logged, and told to agents, in the course of a turn names its trace."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul_common.errors import UnavailableError
from backhaul_common.logs import configure_logging
from backhaul_router.core.claims import Claim, KeptBlocks
from backhaul_router.core.engines import Failure
from tests.unit.router.ports import Bench


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = io.StringIO()
    configure_logging("debug", "router", out)
    yield out
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def logged(lines: io.StringIO) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, lines.getvalue().splitlines()) if line["logger"] != "asyncio"]


def trace_of(spans: InMemorySpanExporter) -> str:
    [turn] = [span for span in spans.get_finished_spans() if span.name == "turn"]
    assert turn.context is not None
    return trace.format_trace_id(turn.context.trace_id)


async def test_every_line_of_a_turn_names_its_trace(spans: InMemorySpanExporter, lines: io.StringIO) -> None:
    bench = Bench()
    bench.publish("a")
    bench.engines.prefill_steps = [Failure.FAULT]
    await bench.chat("a", "b", "c")
    events = {line["event"]: line.get("trace_id") for line in logged(lines)}
    assert events == {"pair set apart": trace_of(spans), "turn": trace_of(spans)}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_so_does_that_of_an_engine_that_is_ejected(
    spans: InMemorySpanExporter, lines: io.StringIO, leg: str
) -> None:
    bench = Bench()
    steps = bench.engines.prefill_steps if leg == "prefill" else bench.engines.decode_steps
    steps.append(Failure.REFUSED)
    await bench.chat("a")
    events = {line["event"]: line.get("trace_id") for line in logged(lines)}
    assert events == {"node ejected": trace_of(spans), "turn": trace_of(spans)}


async def test_so_does_that_of_a_lookup_that_failed(spans: InMemorySpanExporter, lines: io.StringIO) -> None:
    bench = Bench()
    bench.registry.failure = UnavailableError("AWAY", "away")
    await bench.chat("a", "b", "c")
    assert {line["event"]: line.get("trace_id") for line in logged(lines)} == {
        "lookup failed": trace_of(spans),
        "turn": trace_of(spans),
    }


async def test_what_is_given_back_is_given_back_within_the_trace(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, within = Bench(), []

    def give_back(source: Claim | KeptBlocks) -> None:
        within.append(trace.format_trace_id(trace.get_current_span().get_span_context().trace_id))

    monkeypatch.setattr(bench.owner, "give_back", give_back)
    bench.publish("a")
    bench.owner.handle = "no object"
    await bench.chat("a", "b", "c")
    assert within == [trace_of(spans)]
