"""The best engine gets the leg."""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Picker, Scored
from backhaul_router.core.routing.recency import Recency
from backhaul_router.core.routing.target import Target

TIE = 0.01
"""Scores that are less than this part apart are equal: estimates are not that good."""


class BestPicker:
    """Picks an engine with the highest score. Equal ones take turns: the one whose last turn is longest ago."""

    name = "best"

    def __init__(self, recency: Recency) -> None:
        self._recency = recency

    def pick(self, demand: Demand, leg: Leg, scored: Sequence[Scored]) -> Target:
        """Returns it."""
        enough = max(each.score for each in scored) * (1.0 - TIE)
        equal = [each.target for each in scored if each.score >= enough]
        return min(equal, key=lambda target: self._recency.last(target.key))


_: type[Picker] = BestPicker
