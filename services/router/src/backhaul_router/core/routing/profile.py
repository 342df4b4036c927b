"""How the engine for a leg is chosen: filters, then scorers, then a picker.

A profile remembers nothing: running it twice asks twice. What was picked counts only once a leg is sent there
(`Live.picked`), so a route that is merely weighed costs nobody a turn.
"""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.explanation import ProfileExplanation, Rating
from backhaul_router.core.routing.plugin import Filter, Picker, Scored, Scorer
from backhaul_router.core.routing.target import Target


class Profile:
    """Filters, weighed scorers and a picker, for one leg."""

    def __init__(self, filters: Sequence[Filter], scorers: Sequence[tuple[Scorer, float]], picker: Picker) -> None:
        """Scorers come with their weights, which are positive."""
        self._filters = tuple(filters)
        self._scorers = tuple(scorers)
        self._picker = picker
        self._total_weight = sum(weight for _, weight in scorers)

    def run(
        self, demand: Demand, leg: Leg, targets: Sequence[Target], explanation: ProfileExplanation | None = None
    ) -> Target | None:
        """Returns the engine for a leg, None when none is left; the explanation then says who took the last."""
        if explanation is not None:
            explanation.begin(leg, targets)
        left = self._filtered(demand, leg, targets, explanation)
        if not left:
            return None
        if len(left) == 1 and explanation is None:
            # Nobody has to be better than anybody.
            return left[0]
        picked = self._picker.pick(demand, leg, self._rated(demand, leg, left, explanation))
        if explanation is not None:
            explanation.picked = picked
        return picked

    def admits(self, demand: Demand, leg: Leg, target: Target) -> bool:
        """Tells whether filters leave this engine for a leg, where there is no other."""
        return bool(self._filtered(demand, leg, (target,), None))

    def _filtered(
        self, demand: Demand, leg: Leg, targets: Sequence[Target], explanation: ProfileExplanation | None
    ) -> Sequence[Target]:
        left = targets
        for each in self._filters:
            kept = each.keep(demand, leg, left)
            if explanation is not None:
                explanation.removed(each.name, left, kept)
            left = kept
            if not left:
                break
        return left

    def _rated(
        self, demand: Demand, leg: Leg, targets: Sequence[Target], explanation: ProfileExplanation | None
    ) -> list[Scored]:
        scores = [[_bounded(score) for score in scorer.score(demand, leg, targets)] for scorer, _ in self._scorers]
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


def _bounded(score: float) -> float:
    # What is no number is worth nothing.
    if 0.0 <= score <= 1.0:
        return float(score)
    return 1.0 if score > 1.0 else 0.0
