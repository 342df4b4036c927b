"""Pairs that failed to exchange blocks a moment ago are split up."""

from collections.abc import Sequence
from typing import Protocol

from backhaul_router.core.nodes import Node
from backhaul_router.core.routing.compatibility import Partners, partners_of
from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.plugin import Filter
from backhaul_router.core.routing.target import Target


class Pairs(Protocol):
    """What became of reads, pair by pair."""

    @property
    def all_well(self) -> bool:
        """Whether no pair is set apart, nor was of late."""
        ...

    def apart(self, one: Node, other: Node) -> bool:
        """Tells whether another pair should be preferred."""
        ...


class PairsApartFilter:
    """Prefers engines with a partner from which they are not apart.

    Where a read of what a holder retains is likely to fail, computing is faster: then none is left.
    """

    name = "pairs-apart"

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns those; all of them when every one is apart from all its partners, but none for a read."""
        partners = partners_of(demand, leg)
        if not partners or self._pairs.all_well:
            return targets
        kept = self._with_one(targets, partners[0]) if len(partners) == 1 else self._with_any(targets, partners)
        return kept if kept or leg is Leg.READ else targets

    def _with_one(self, targets: Sequence[Target], partner: Target) -> Sequence[Target]:
        apart = self._pairs.apart
        return [target for target in targets if not apart(target.node, partner.node)]

    def _with_any(self, targets: Sequence[Target], partners: Sequence[Target]) -> Sequence[Target]:
        # A partner with which no blocks can be exchanged anyhow is no way out.
        apart, others = self._pairs.apart, Partners(partners, read=False)
        return [
            target for target in targets if any(not apart(target.node, partner.node) for partner in others.of(target))
        ]


_: type[Filter] = PairsApartFilter
