"""What is logged, and told to agents, in the course of a turn names its trace."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul_common.errors import UnavailableError
from backhaul_router.core.claims import Claim, KeptBlocks
from backhaul_router.core.engines import Failure
from tests.fakes.log_lines import LogLines, log_lines
from tests.unit.router.ports import Bench


@pytest.fixture
def lines() -> Iterator[LogLines]:
    with log_lines("router") as lines:
        yield lines


def trace_of(spans: InMemorySpanExporter) -> str:
    [turn] = [span for span in spans.get_finished_spans() if span.name == "turn"]
    assert turn.context is not None
    return trace.format_trace_id(turn.context.trace_id)


async def test_every_line_of_a_turn_names_its_trace(spans: InMemorySpanExporter, lines: LogLines) -> None:
    bench = Bench()
    bench.publish("a")
    bench.engines.prefill_steps = [Failure.FAULT]
    await bench.chat("a", "b", "c")
    assert lines.traces() == {"pair set apart": trace_of(spans), "turn": trace_of(spans)}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_so_does_that_of_an_engine_that_is_ejected(
    spans: InMemorySpanExporter, lines: LogLines, leg: str
) -> None:
    bench = Bench()
    steps = bench.engines.prefill_steps if leg == "prefill" else bench.engines.decode_steps
    steps.append(Failure.REFUSED)
    await bench.chat("a")
    assert lines.traces() == {"node ejected": trace_of(spans), "turn": trace_of(spans)}


async def test_so_does_that_of_a_lookup_that_failed(spans: InMemorySpanExporter, lines: LogLines) -> None:
    bench = Bench()
    bench.registry.failure = UnavailableError("AWAY", "away")
    await bench.chat("a", "b", "c")
    assert lines.traces() == {
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
