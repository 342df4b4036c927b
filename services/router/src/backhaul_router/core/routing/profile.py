"""How the engine for a leg is chosen: filters, then scorers, then a picker.

A profile remembers nothing: running it twice asks twice. What was picked counts only once a leg is sent there
(`Live.picked`), so a route that is merely weighed costs nobody a turn.
"""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.explanation import ProfileExplanation, Rating
from backhaul_router.core.routing.plugin import Filter, Picker, Scored, Scorer
from backhaul_router.core.routing.shortlist import NAME, Shortlist
from backhaul_router.core.routing.target import Target


class Profile:
    """Filters, weighed scorers and a picker, for one leg."""

    def __init__(
        self,
        filters: Sequence[Filter],
        scorers: Sequence[tuple[Scorer, float]],
        picker: Picker,
        *,
        required: Sequence[Filter] = (),
        shortlist: Shortlist | None = None,
    ) -> None:
        """Scorers come with their weights, which are positive. ``required`` filters run before the others."""
        self._required = tuple(required)
        self._filters = tuple(filters)
        self._shortlist = shortlist
        self._scorers = tuple(scorers)
        self._picker = picker
        self._total_weight = sum(weight for _, weight in scorers)

    def run(
        self, demand: Demand, leg: Leg, targets: Sequence[Target], explanation: ProfileExplanation | None = None
    ) -> Target | None:
        """Returns the engine for a leg, None when none is left; the explanation then says who took the last."""
        if explanation is not None:
            explanation.begin(leg, targets)
        able = _filtered(self._required, demand, leg, targets, explanation)
        return self.pick(demand, leg, able, explanation)

    def pick(
        self, demand: Demand, leg: Leg, able: Sequence[Target], explanation: ProfileExplanation | None = None
    ) -> Target | None:
        """Does the same for engines that the required filters leave."""
        left = _filtered(self._filters, demand, leg, able, explanation)
        if not left:
            return None
        if len(left) == 1 and explanation is None:
            # Nobody has to be better than anybody.
            return left[0]
        if self._shortlist is not None and self._scorers:
            short = self._shortlist.of(demand, leg, left, self._score)
            if explanation is not None:
                explanation.removed(NAME, left, short)
            left = short
        picked = self._picker.pick(demand, leg, self._rated(demand, leg, left, explanation))
        if explanation is not None:
            explanation.picked = picked
        return picked

    def admits(self, demand: Demand, leg: Leg, target: Target) -> bool:
        """Tells whether filters leave this engine for a leg, where there is no other."""
        return bool(_filtered((*self._required, *self._filters), demand, leg, (target,), None))

    def _score(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> list[float]:
        return self._totals(self._columns(demand, leg, targets), len(targets))

    def _columns(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> list[list[float]]:
        return [[_bounded(score) for score in scorer.score(demand, leg, targets)] for scorer, _ in self._scorers]

    def _rated(
        self, demand: Demand, leg: Leg, targets: Sequence[Target], explanation: ProfileExplanation | None
    ) -> list[Scored]:
        scores = self._columns(demand, leg, targets)
        totals = self._totals(scores, len(targets))
        if explanation is not None:
            names = [scorer.name for scorer, _ in self._scorers]
            explanation.ratings = tuple(
                Rating(target, tuple((name, column[i]) for name, column in zip(names, scores, strict=True)), totals[i])
                for i, target in enumerate(targets)
            )
        return [Scored(target, total) for target, total in zip(targets, totals, strict=True)]

    def _totals(self, scores: Sequence[Sequence[float]], count: int) -> list[float]:
        """Weighs the scorers' columns. Without a scorer all targets are equal."""
        if not scores:
            return [1.0] * count
        totals = [0.0] * count
        for column, (_, weight) in zip(scores, self._scorers, strict=True):
            share = weight / self._total_weight
            totals = [total + share * score for total, score in zip(totals, column, strict=True)]
        return totals


def _filtered(
    filters: Sequence[Filter],
    demand: Demand,
    leg: Leg,
    targets: Sequence[Target],
    explanation: ProfileExplanation | None,
) -> Sequence[Target]:
    left = targets
    for each in filters:
        if not left:
            break
        kept = each.keep(demand, leg, left)
        if explanation is not None:
            explanation.removed(each.name, left, kept)
        left = kept
    return left


def _bounded(score: float) -> float:
    # What is no number is worth nothing.
    if 0.0 <= score <= 1.0:
        return float(score)
    return 1.0 if score > 1.0 else 0.0
