"""Chance gives the leg, to better engines more often."""

import random
from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Picker, Scored
from backhaul_router.core.routing.target import Target


class WeightedRandomPicker:
    """Picks each engine in proportion to its score."""

    name = "weighted-random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, demand: Demand, leg: Leg, scored: Sequence[Scored]) -> Target:
        """Returns one; any one when all scores are 0."""
        weights = [each.score for each in scored]
        if not any(weights):
            return self._rng.choice(scored).target
        return self._rng.choices(scored, weights)[0].target


_: type[Picker] = WeightedRandomPicker
