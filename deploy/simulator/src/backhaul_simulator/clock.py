"""The process's own ``time.perf_counter``: each machine has its own epoch and its own quartz."""

import time
from collections.abc import Callable


def skewed(clock: Callable[[], float], *, offset_s: float, rate_ppm: float) -> Callable[[], float]:
    """Returns a clock that is ahead of ``clock`` by ``offset_s`` now, and runs ``rate_ppm`` millionths faster."""
    start = clock()
    rate = 1.0 + rate_ppm / 1e6

    def read() -> float:
        return start + offset_s + (clock() - start) * rate

    return read


def install(*, offset_s: float, rate_ppm: float) -> None:
    """Replaces ``time.perf_counter`` of this process. Call it before anything imports it by name."""
    if offset_s or rate_ppm:
        time.perf_counter = skewed(time.perf_counter, offset_s=offset_s, rate_ppm=rate_ppm)
