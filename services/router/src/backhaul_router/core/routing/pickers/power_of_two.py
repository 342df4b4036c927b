"""The better one of two engines that chance names gets the leg."""

import random
from collections.abc import Sequence

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Picker, Scored
from backhaul_router.core.routing.target import Target


class PowerOfTwoPicker:
    """Picks the better one of two. Many routers that see the same old figures so do not all run to the same engine."""

    name = "power-of-two"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, demand: Demand, leg: Leg, scored: Sequence[Scored]) -> Target:
        """Returns it; the only one when there are not two."""
        drawn = self._rng.sample(scored, min(2, len(scored)))
        return max(drawn, key=lambda each: each.score).target


_: type[Picker] = PowerOfTwoPicker
