"""What is known of the engines at this moment: all that plugins are given."""

import random
from dataclasses import dataclass

from backhaul_router.core.health.breakers import Breakers
from backhaul_router.core.health.pairs import Pairs
from backhaul_router.core.load import Load
from backhaul_router.core.routing.costs import Costs
from backhaul_router.core.routing.estimates import Estimator
from backhaul_router.core.routing.prefixes import Prefixes
from backhaul_router.core.routing.recency import Recency
from backhaul_router.core.routing.reports import Reports
from backhaul_router.core.routing.shortlist import Shortlist
from backhaul_router.core.routing.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Figures of one router, all of them learnt: a router that has just started knows nothing."""

    load: Load
    costs: Costs
    prefixes: Prefixes
    reports: Reports
    breakers: Breakers
    pairs: Pairs
    recency: Recency
    estimator: Estimator
    shortlist: Shortlist
    rng: random.Random

    def picked(self, target: Target) -> None:
        """A leg goes to this engine."""
        self.breakers.picked(target.node)
        self.recency.picked(target)
