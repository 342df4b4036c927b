"""What plugins do: filters remove targets, scorers rate the others, a picker names one.

A profile runs them for one leg of a turn, in the order of its configuration. Plugins are pure: what they know of the
moment comes in through their constructor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.target import Target


@dataclass(frozen=True, slots=True)
class Scored:
    """A target and what it is worth, the more the better."""

    target: Target
    score: float


class Filter(Protocol):
    """Removes targets that must not, or should not, serve a leg."""

    name: str
    """Type in the configuration and in explanations, in kebab-case."""

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns the targets that stay, in their order. May return none."""
        ...


class Scorer(Protocol):
    """Rates targets."""

    name: str

    def score(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[float]:
        """Returns a number from 0 (worst) to 1 for each target; the profile bounds and weighs it."""
        ...


class Picker(Protocol):
    """Names a target."""

    name: str

    def pick(self, demand: Demand, leg: Leg, scored: Sequence[Scored]) -> Target:
        """Returns one of at least one target."""
        ...
