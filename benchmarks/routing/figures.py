"""What the arms' times come to: means, and how sure they are."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from benchmarks.routing.turn_log import Estimated

_RESAMPLES = 2_000
_TAIL = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One turn of an arm."""

    conversation: str
    """With the block that it was played in: it has the same turns in every arm."""
    route: str
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """All turns of one arm on one load. Times are seconds."""

    turn_count: int
    mean_ttft_s: float
    median_ttft_s: float
    p95_ttft_s: float
    routes: Mapping[str, float]
    """Share of turns by route, the most frequent first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far times to the first token were from their estimates; seconds."""

    mean_s: float
    """Positive: they took longer."""
    mean_absolute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Mean time to first token of the chosen routes, over that of a fixed policy."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval: conversations drawn again, the same ones for both."""


def figures_of(turns: Sequence[Timed]) -> ArmFigures:
    """Returns the figures of at least one turn."""
    times = sorted(turn.ttft_s for turn in turns)
    routes = Counter(turn.route for turn in turns)
    return ArmFigures(
        turn_count=len(times),
        mean_ttft_s=fmean(times),
        median_ttft_s=times[len(times) // 2],
        p95_ttft_s=times[int(0.95 * len(times))],
        routes={route: count / len(times) for route, count in routes.most_common()},
    )


def errors_of(turns: Sequence[Estimated]) -> Errors:
    """Returns the errors of at least one estimate."""
    errors = [turn.ttft_s - turn.estimate_s for turn in turns]
    return Errors(mean_s=fmean(errors), mean_absolute_s=fmean(map(abs, errors)))


def ratio_of(chosen: Sequence[Timed], fixed: Sequence[Timed], *, seed: str = "") -> Ratio:
    """Compares two arms over the conversations that both have played. Raises ValueError when there is none."""
    ours, theirs = _by_conversation(chosen), _by_conversation(fixed)
    names = sorted(ours.keys() & theirs.keys())
    if not names:
        raise ValueError("the arms have no conversation in common")
    draw = Random(seed)
    drawn = sorted(_ratio(ours, theirs, draw.choices(names, k=len(names))) for _ in range(_RESAMPLES))
    tail = int(_TAIL * _RESAMPLES)
    return Ratio(value=_ratio(ours, theirs, names), low=drawn[tail], high=drawn[-1 - tail])


_Sums = Mapping[str, tuple[float, int]]
"""By conversation: the sum of its times, and their number."""


def _by_conversation(turns: Iterable[Timed]) -> _Sums:
    sums: dict[str, tuple[float, int]] = {}
    for turn in turns:
        seconds, count = sums.get(turn.conversation, (0.0, 0))
        sums[turn.conversation] = seconds + turn.ttft_s, count + 1
    return sums


def _ratio(ours: _Sums, theirs: _Sums, names: Sequence[str]) -> float:
    return _mean(ours, names) / _mean(theirs, names)


def _mean(sums: _Sums, names: Sequence[str]) -> float:
    return sum(sums[name][0] for name in names) / sum(sums[name][1] for name in names)
