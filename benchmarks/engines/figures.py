"""What the times of two arms come to: medians, their ratio, and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

_RESAMPLES = 2_000
_TAIL = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How many times sooner the first token is there than in the other arm."""

    value: float
    """Ratio of the medians."""
    low: float
    high: float
    """Ends of the 95 % interval: turns drawn again, in both arms."""


def speedup(ours: Sequence[float], theirs: Sequence[float], *, seed: str = "") -> Speedup:
    """Compares times, seconds, of at least one turn each."""
    draw = Random(seed)
    drawn = sorted(
        median(draw.choices(theirs, k=len(theirs))) / median(draw.choices(ours, k=len(ours))) for _ in range(_RESAMPLES)
    )
    tail = int(_TAIL * _RESAMPLES)
    return Speedup(value=median(theirs) / median(ours), low=drawn[tail], high=drawn[-1 - tail])
