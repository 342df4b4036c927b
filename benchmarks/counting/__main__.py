"""Measures what it costs a router to count: processor time of one turn's instruments, and of one reading of all.

What a warm turn does to the instruments is done a few thousand times, with nobody counting and with OpenTelemetry's SDK
behind them. `python -m benchmarks.counting`
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry import metrics
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from backhaul_common.exposition import meter_provider
from backhaul_common.metering import Counter, Histogram, Metric
from backhaul_router import instruments

_TURNS = 5_000
_ROUNDS = 5
_WARM: tuple[tuple[Metric, float, tuple[str, ...]], ...] = (
    (instruments.LOOKUP_DURATION, 0.002, ()),
    (instruments.CLAIMS, 1, (instruments.GRANTED,)),
    (instruments.CLAIM_DURATION, 0.003, ()),
    (instruments.HAND_OFF, 0.001, ()),
    (instruments.TURNS, 1, ("warm", "ok", "model")),
    (instruments.TURN_DURATION, 2.0, ("warm",)),
    (instruments.TTFT, 0.2, ("warm",)),
    (instruments.ESTIMATE_ERROR, 1.1, ("warm",)),
    (instruments.PROMPT_TOKENS, 900, ("read",)),
    (instruments.PROMPT_TOKENS, 50, ("local",)),
    (instruments.PROMPT_TOKENS, 50, ("computed",)),
)
"""What one warm turn tells which instrument."""

Count = Callable[[], object]


def _turn() -> Count:
    """Returns what counts one turn."""
    made: dict[str, Counter | Histogram] = {}
    for metric, _, _ in _WARM:
        made.setdefault(metric.name, Histogram(metric) if metric.bounds else Counter(metric))

    def count() -> None:
        for metric, amount, labels in _WARM:
            instrument = made[metric.name]
            if isinstance(instrument, Histogram):
                instrument.record(amount, *labels)
            else:
                instrument.add(amount, *labels)

    return count


def _us(count: Count, times: int) -> float:
    """Returns processor time of one call, microseconds: the least of several rounds."""
    rounds = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        for _ in range(times):
            count()
        rounds.append(time.process_time() - began)
    return min(rounds) / times * 1e6


@contextmanager
def _counted(registry: CollectorRegistry) -> Iterator[None]:
    provider = meter_provider("backhaul-router", "benchmark", registry)
    metrics.set_meter_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


def main() -> int:
    """Prints three figures."""
    console = Console()
    off = _us(_turn(), _TURNS)
    registry = CollectorRegistry()
    with _counted(registry):
        on = _us(_turn(), _TURNS)
        for reason in instruments.MISS_REASONS:
            Counter(instruments.MISSES).add(1, reason)
        reading = _us(lambda: generate_latest(registry), 20)
        lines = generate_latest(registry).count(b"\n")
    console.print(f"a turn's instruments, nobody counts: {off:.0f} us; counted: {on:.0f} us")
    console.print(f"one reading, {lines} lines: {reading / 1000:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
