"""Which engines are rated for a turn where there are many: those that stood best of late, and those with its prompt.

To rate an engine takes microseconds, and a large cluster has a hundred. So all of them are rated only once a second,
for a prompt of which nobody has anything; in between a turn rates the best of them that were given nothing since, and
those that probably have some of its own prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from backhaul_router.core.routing.demand import Demand, Leg, Prefix
from backhaul_router.core.routing.recency import Recency
from backhaul_router.core.routing.target import Target, TargetKey

ALL = 8
"""So many engines are all rated."""

BEST, FAMILIAR = 5, 3
"""Of more engines: those that stood best, and those that have some of the prompt, the longest beginnings first."""

MAX_AGE_S = 1.0
"""How long it counts how engines stood, seconds: agents say once a second what theirs have to do."""

MAX_MODELS = 256
"""Models for which it is remembered."""

NAME = "shortlist"
"""In explanations."""

Rate = Callable[[Demand, Leg, Sequence[Target]], Sequence[float]]


class Familiar(Protocol):
    """Who has been sent a beginning of a prompt."""

    def familiar(self, prefixes: Sequence[Prefix]) -> Iterator[TargetKey]:
        """Yields them, those with the longest beginning first; some more than once."""
        ...


@dataclass(frozen=True, slots=True)
class _Standing:
    """How engines stood."""

    targets: Sequence[Target]
    best_first: Sequence[Target]
    by_key: dict[TargetKey, Target]
    at: float
    picks: int
    """Picks until then."""


class Shortlist:
    """Keeps how the engines of each leg stood."""

    def __init__(self, monotonic: Callable[[], float], familiar: Familiar, recency: Recency) -> None:
        self._monotonic = monotonic
        self._familiar = familiar
        self._recency = recency
        self._standings: dict[tuple[Leg, str], _Standing] = {}

    def of(self, demand: Demand, leg: Leg, targets: Sequence[Target], rate: Rate) -> Sequence[Target]:
        """Returns those to rate for a turn, in no order: at least one of at least one."""
        if len(targets) <= ALL:
            return targets
        standing = self._standing(demand, leg, targets, rate)
        short = {target.key: target for target in self._best(standing)}
        known = (standing.by_key[key] for key in self._familiar.familiar(demand.prefixes) if key in standing.by_key)
        if demand.held and (holder := standing.by_key.get(demand.held.holder.key)):
            short[holder.key] = holder
        for target in islice(known, FAMILIAR):
            short[target.key] = target
        return [*short.values()]

    def _standing(self, demand: Demand, leg: Leg, targets: Sequence[Target], rate: Rate) -> _Standing:
        """Rates all when that was too long ago, or for others."""
        now, name = self._monotonic(), (leg, demand.model)
        standing = self._standings.get(name)
        if standing is None or now - standing.at > MAX_AGE_S or not _equal(standing.targets, targets):
            scores = rate(replace(demand, prefixes=(), held=None), leg, targets)
            order = sorted(range(len(targets)), key=lambda index: -scores[index])
            by_key = {target.key: target for target in targets}
            standing = _Standing(targets, [targets[index] for index in order], by_key, now, self._recency.picks)
            if len(self._standings) >= MAX_MODELS:
                self._standings.clear()
            self._standings[name] = standing
        return standing

    def _best(self, standing: _Standing) -> Sequence[Target]:
        """Returns the best ones that were given nothing since; those whose turn is longest ago, where there are few."""
        last, picks = self._recency.last, standing.picks
        best = [*islice((target for target in standing.best_first if last(target.key) <= picks), BEST)]
        if len(best) < BEST:
            picked = [target for target in standing.best_first if last(target.key) > picks]
            best += sorted(picked, key=lambda target: last(target.key))[: BEST - len(best)]
        return best


def _equal(one: Sequence[Target], other: Sequence[Target]) -> bool:
    return one is other or (len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True)))
