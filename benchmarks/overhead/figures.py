"""What windows come to, and how arms compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.overhead.play import Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One arm's, on one load, with so many streams; medians of rounds."""

    count: int
    """Turns, or events, of all rounds."""
    per_s: float
    p50_s: float
    """Of the time to the first byte, or from an event's sending to its coming."""
    p99_s: float
    added_s: float
    """How much more the median is than that of a client that sends both legs itself, in the same round."""
    cpu_s: float
    """CPU seconds for each, of the processes between client and engines; 0: there are none."""
    failures: tuple[str, ...]

    @property
    def per_core_s(self) -> float:
        """How many one core could do in a second, had it nothing else to do; 0: no core does anything."""
        return 1 / self.cpu_s if self.cpu_s > 0 else 0.0


def figures_of(
    rounds: Sequence[Seen], direct: Sequence[Seen], processes: Sequence[str], idle: Mapping[str, float]
) -> Figures:
    """Returns an arm's figures; ``direct`` are the same rounds without it, ``idle`` what processes do for nothing."""
    counts = [max(1, seen.count) for seen in rounds]
    spent = [
        sum(seen.cpu_s[name] - idle.get(name, 0.0) * seen.seconds for name in processes) / count
        for seen, count in zip(rounds, counts, strict=True)
    ]
    p50s, directs = ([quantile(seen.times_s, 0.5) for seen in each] for each in (rounds, direct))
    return Figures(
        count=sum(seen.count for seen in rounds),
        per_s=median(seen.count / seen.seconds for seen in rounds),
        p50_s=median(p50s),
        p99_s=median(quantile(seen.times_s, 0.99) for seen in rounds),
        added_s=median(of - without for of, without in zip(p50s, directs, strict=True)),
        cpu_s=max(0.0, median(spent)),
        failures=tuple(sorted({failure for seen in rounds for failure in seen.failures})),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value that this share of all does not exceed; 0 of none."""
    return sorted(values)[round(share * (len(values) - 1))] if values else 0.0


def ratio(one: float, other: float) -> float | None:
    """Returns how many times the other one this is; None where either is nothing."""
    return one / other if one and other > 0 else None
