"""Callers that never rest: each calls again as soon as it is answered."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.routing.machine import process_s

Call = Callable[[], Awaitable[None]]
"""One operation of one caller."""


@dataclass(slots=True)
class Timings:
    """What callers saw of one arm, in all rounds."""

    latencies_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Operations per second, of each round."""
    cpu_s: float = 0.0
    """What the serving processes used in all rounds."""

    def quantile_s(self, share: float) -> float:
        """Returns the latency that a share of the operations did not exceed."""
        ranked = sorted(self.latencies_s)
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))]

    @property
    def cpu_us(self) -> float:
        """Processor time of the serving processes per operation, microseconds."""
        return 1e6 * self.cpu_s / len(self.latencies_s)


async def measure(calls: Sequence[Call], seconds: float, pids: Sequence[int], timings: Timings) -> None:
    """Has each caller call for so long, and adds what they saw. Raises what a call raises."""
    latencies: list[float] = []
    cpu_s = sum(map(process_s, pids))
    began = time.perf_counter()
    until = began + seconds

    async def go_on(call: Call) -> None:
        while (start := time.perf_counter()) < until:
            await call()
            latencies.append(time.perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(go_on(call))
    timings.rates.append(len(latencies) / (time.perf_counter() - began))
    timings.latencies_s += latencies
    timings.cpu_s += sum(map(process_s, pids)) - cpu_s
