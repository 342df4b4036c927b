"""How the engine for a leg was chosen: what was considered, what removed it, what the rest was worth.

Filled in only where somebody asks, or where nothing was left and the client is told why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.target import Target

BUSY_FILTERS = frozenset({"max-waiting"})
"""Filters that remove what works and has too much to do."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Engines that a filter removed."""

    filter: str
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Rating:
    """What an engine was worth for a leg."""

    target: Target
    scores: tuple[tuple[str, float], ...]
    """Name of each scorer and what it said, before it was weighed."""
    total: float
    """Weighed, from 0 to 1."""


@dataclass(slots=True)
class ProfileExplanation:
    """How the engine for one leg was chosen, filled in by `Profile.run`. Of several runs it holds the last."""

    leg: Leg | None = None
    considered: tuple[Target, ...] = ()
    removals: list[Removal] = field(default_factory=list)
    """In the order of the filters; those that removed nothing are left out."""
    ratings: tuple[Rating, ...] = ()
    picked: Target | None = None
    drained_by: str = ""
    """The filter that removed the last engine; empty when some were left, or none was there from the beginning."""

    @property
    def busy(self) -> bool:
        """Whether nothing was left only because what is there has too much to do: later it may have less."""
        return self.drained_by in BUSY_FILTERS

    def begin(self, leg: Leg, targets: Sequence[Target]) -> None:
        """A run begins."""
        self.leg, self.considered = leg, tuple(targets)
        self.removals, self.ratings, self.picked, self.drained_by = [], (), None, ""

    def removed(self, name: str, before: Sequence[Target], after: Sequence[Target]) -> None:
        """A filter has run."""
        kept = {id(target) for target in after}
        gone = tuple(target for target in before if id(target) not in kept)
        if gone:
            self.removals.append(Removal(name, gone))
        if before and not after:
            self.drained_by = name
