"""How long conversations are silent between two turns, learnt while the agent runs.

Survival statistics: the ages at which turns came back, and the ages until which others were watched in vain, are
counted in bins of equal width on a logarithmic scale. A bin's hazard is returns over time watched, so that what was
watched for a short time only says nothing about later ages. Crowds with few observations lean on all crowds of their
pace, these on a stated prior; old observations fade.
"""

import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise

MAX_SCOPES = 1_000
"""Scopes remembered at most; the one that was observed longest ago is forgotten first."""

_SHORTEST_S = 0.001
_LONGEST_S = 3_600.0
_BINS_PER_DECADE = 4
_BIN_COUNT = 1 + math.ceil(math.log10(_LONGEST_S / _SHORTEST_S) * _BINS_PER_DECADE)
_RATIO: float = (_LONGEST_S / _SHORTEST_S) ** (1 / (_BIN_COUNT - 1))
_PER_LOG = 1 / math.log(_RATIO)
EDGES_S = [0.0, *(_SHORTEST_S * _RATIO**index for index in range(_BIN_COUNT - 1)), _LONGEST_S]
"""Bin n is from edge n to edge n + 1; the first one is all below a millisecond."""
_WIDTHS = [end - begin for begin, end in pairwise(EDGES_S)]

_HALF_LIFE_S = 4 * 3_600.0
"""After this time an observation counts half."""
_MOST_WEIGHT = 1e12
"""Weights grow with time instead of all old ones shrinking; above this they are all divided by it."""
_STRENGTH = 10.0
"""As many conversations of its own let a crowd weigh as much as what it leans on."""
_STALENESS = 0.05
"""A table is made anew when observations have grown by this share."""


class Pace(IntEnum):
    """How a conversation has gone so far: by the gap before its last turn."""

    FIRST = 0
    """Its first turn: there was no gap."""
    FAST = 1
    """Under 5 seconds: a program calls."""
    STEADY = 2
    """Under 30 seconds: a slow tool, or a quick reader."""
    SLOW = 3
    """Under 5 minutes: a person reads and writes."""
    IDLE = 4
    """Longer: a person does other things in between."""


_PACE_ENDS = ((5.0, Pace.FAST), (30.0, Pace.STEADY), (300.0, Pace.SLOW))


def pace_after(gap_s: float | None) -> Pace:
    """Returns the pace of a conversation whose last turn came after a gap; None: it was the first."""
    if gap_s is None:
        return Pace.FIRST
    return next((pace for end_s, pace in _PACE_ENDS if gap_s < end_s), Pace.IDLE)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Conversations whose gaps are alike."""

    scope: str
    """Digest of model, salt and tenant."""
    pace: Pace


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed of gaps before any was seen: programs come back, people come back, or nobody does."""

    programs: float
    """Share of gaps that end by a tool's answer: lognormal, median 2 s."""
    people: float
    """Share of gaps that end by a person's: lognormal, median 90 s. The rest never ends."""

    def survival(self, age_s: float) -> float:
        """Returns the share of gaps that are longer."""
        returned = self.programs * _lognormal(age_s, 2.0, 1.6) + self.people * _lognormal(age_s, 90.0, 1.2)
        return 1.0 - returned


PRIORS = {
    Pace.FIRST: Prior(0.35, 0.3),
    Pace.FAST: Prior(0.8, 0.12),
    Pace.STEADY: Prior(0.6, 0.25),
    Pace.SLOW: Prior(0.3, 0.4),
    Pace.IDLE: Prior(0.2, 0.4),
}


class Gaps:
    """What was seen of gaps, by crowd, and what it lets expect."""

    def __init__(self) -> None:
        self._paces = [_Counts(_Prior.of(PRIORS[pace])) for pace in Pace]
        self._scopes: OrderedDict[str, list[_Counts]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scopes)

    def __contains__(self, scope: str) -> bool:
        return scope in self._scopes

    def returned(self, crowd: Crowd, gap_s: float, now: float) -> None:
        """Notes that a turn came after a gap, whether or not its set was still there."""
        for counts in self._counts(crowd):
            counts.add(gap_s, now, returned=True)

    def silent(self, crowd: Crowd, age_s: float, now: float) -> None:
        """Notes that a conversation was watched until an age in vain, and is watched no more."""
        for counts in self._counts(crowd):
            counts.add(age_s, now, returned=False)

    def rate(self, crowd: Crowd, age_s: float) -> float:
        """Returns the best expected returns per second of keeping on, for a conversation silent until ``age_s``.

        The greatest ratio, over all times T, of the chance of a return within T and the expected time until the return
        or T, whichever is first.
        """
        return self._table(crowd).rate(age_s)

    def chance(self, crowd: Crowd, age_s: float, within_s: float) -> float:
        """Returns the chance of a return within a time, for a conversation silent until ``age_s``."""
        return self._table(crowd).chance(age_s, within_s)

    def _table(self, crowd: Crowd) -> "_Table":
        scope = self._scopes.get(crowd.scope)
        return (self._paces if scope is None else scope)[crowd.pace].table()

    def _counts(self, crowd: Crowd) -> tuple["_Counts", "_Counts"]:
        scope = self._scopes.get(crowd.scope)
        if scope is None:
            scope = self._scopes[crowd.scope] = [_Counts(parent) for parent in self._paces]
            if len(self._scopes) > MAX_SCOPES:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(crowd.scope)
        return scope[crowd.pace], self._paces[crowd.pace]


class _Prior:
    """A stated distribution, where counts would be."""

    def __init__(self, hazards: list[float]) -> None:
        self.hazards = hazards
        self.seen = 0

    @classmethod
    def of(cls, prior: Prior) -> "_Prior":
        logs = [math.log(prior.survival(edge)) for edge in EDGES_S]
        return cls([before - after for before, after in pairwise(logs)])


class _Counts:
    """What was seen of one crowd."""

    def __init__(self, parent: "_Counts | _Prior") -> None:
        self._parent = parent
        self.seen = 0
        """Observations ever."""
        self._returns = array("d", bytes(8 * _BIN_COUNT))
        """By bin: returns in it."""
        self._ends = array("d", bytes(8 * (_BIN_COUNT + 1)))
        """By bin: watches that ended in it, with or without a return; last of all those that outlasted all bins."""
        self._parts = array("d", bytes(8 * _BIN_COUNT))
        """By bin: what those that ended in it saw of it, in widths of the bin."""
        self._weight = 1.0
        """Of an observation at ``_weighed_at``."""
        self._weighed_at = -math.inf
        self._hazards: list[float] = []
        self._made: _Table | None = None
        self._made_at = (-1, -1)

    def add(self, age_s: float, now: float, *, returned: bool) -> None:
        """Counts one observation."""
        self._grow(now)
        self.seen += 1
        index = _bin(age_s)
        self._ends[index] += self._weight
        if index == _BIN_COUNT:
            return
        self._parts[index] += self._weight * (age_s - EDGES_S[index]) / _WIDTHS[index]
        if returned:
            self._returns[index] += self._weight

    @property
    def hazards(self) -> list[float]:
        """By bin: expected returns of one conversation that is silent all through it, if it could return again."""
        self._refresh()
        return self._hazards

    def table(self) -> "_Table":
        """Returns what can be expected; at most a few observations old."""
        self._refresh()
        if self._made is None:
            self._made = _Table(self._hazards)
        return self._made

    def _refresh(self) -> None:
        own, parent = self._made_at
        if self.seen <= own * (1 + _STALENESS) and self._parent.seen <= parent * (1 + _STALENESS):
            return
        self._made_at = (self.seen, self._parent.seen)
        self._made = None
        scale = 1 / self._weight
        later = accumulate(reversed(self._ends))
        lasted = list(later)[-2::-1]
        self._hazards = [
            (returns * scale + _STRENGTH * believed) / ((whole + part) * scale + _STRENGTH)
            for returns, whole, part, believed in zip(
                self._returns, lasted, self._parts, self._parent.hazards, strict=True
            )
        ]

    def _grow(self, now: float) -> None:
        """Lets the weight grow, which is as if all former observations faded."""
        if now <= self._weighed_at:
            return
        if self._weighed_at > -math.inf:
            self._weight *= 2.0 ** min((now - self._weighed_at) / _HALF_LIFE_S, 1_000.0)
        self._weighed_at = now
        if self._weight > _MOST_WEIGHT:
            for numbers in (self._returns, self._ends, self._parts):
                for index, number in enumerate(numbers):
                    numbers[index] = number / self._weight
            self._weight = 1.0


class _Table:
    """Hazards, made ready for questions."""

    def __init__(self, hazards: list[float]) -> None:
        self._sums: list[float] = [0.0, *accumulate(hazards)]
        """By edge: the sum of all hazards before it; e to the minus that is the chance to be silent until then."""
        self._rates: list[float] = [*_best_rates(hazards, self._sums), 0.0]

    def rate(self, age_s: float) -> float:
        """See `Gaps.rate`."""
        index = _bin(age_s)
        if index == _BIN_COUNT:
            return 0.0
        begin, end = self._rates[index], self._rates[index + 1]
        return begin + (end - begin) * (age_s - EDGES_S[index]) / _WIDTHS[index]

    def chance(self, age_s: float, within_s: float) -> float:
        """See `Gaps.chance`."""
        return -math.expm1(self._sum(age_s) - self._sum(age_s + within_s))

    def _sum(self, age_s: float) -> float:
        index = _bin(age_s)
        if index == _BIN_COUNT:
            return self._sums[-1]
        share = (age_s - EDGES_S[index]) / _WIDTHS[index]
        return self._sums[index] + share * (self._sums[index + 1] - self._sums[index])


def _best_rates(hazards: list[float], sums: list[float]) -> list[float]:
    """Returns the best rate at the begin of each bin.

    With F the share that has returned by an edge and M the mean time watched until then, the rate of stopping at a
    later edge is the slope of the line between the two points (M, F); the best one is the first side of the upper hull.
    """
    rates = [0.0] * _BIN_COUNT
    returned = [-math.expm1(-total) for total in sums]
    watched = [0.0]
    for index, hazard in enumerate(hazards):
        per_hazard = (returned[index + 1] - returned[index]) / hazard if hazard > 1e-9 else 1 - returned[index]
        watched.append(watched[-1] + per_hazard * _WIDTHS[index])
    hull = [_BIN_COUNT]
    for index in range(_BIN_COUNT - 1, -1, -1):
        while True:
            rate = _slope(returned, watched, index, hull[-1])
            if len(hull) == 1 or rate >= _slope(returned, watched, hull[-1], hull[-2]):
                break
            hull.pop()
        rates[index] = rate
        hull.append(index)
    return rates


def _slope(returned: list[float], watched: list[float], begin: int, end: int) -> float:
    time = watched[end] - watched[begin]
    return (returned[end] - returned[begin]) / time if time > 0 else 0.0


def _bin(age_s: float) -> int:
    if age_s < _SHORTEST_S:
        return 0
    if age_s >= _LONGEST_S:
        return _BIN_COUNT
    index = min(1 + int(math.log(age_s / _SHORTEST_S) * _PER_LOG), _BIN_COUNT - 1)
    # The logarithm may round across an edge.
    if age_s < EDGES_S[index]:
        return index - 1
    return index + 1 if age_s >= EDGES_S[index + 1] else index


def _lognormal(value: float, median: float, sigma: float) -> float:
    """Returns the chance of at most ``value``."""
    if value <= 0:
        return 0.0
    return 0.5 * math.erfc(-math.log(value / median) / (sigma * math.sqrt(2)))
