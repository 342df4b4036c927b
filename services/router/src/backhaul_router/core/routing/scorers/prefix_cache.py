"""The more of a prompt an engine has cached, the better."""

from collections.abc import Sequence
from typing import Protocol

from backhaul_router.core.routing.demand import Demand, Leg, Prefix
from backhaul_router.core.routing.plugin import Scorer
from backhaul_router.core.routing.target import Target, TargetKey


class Cached(Protocol):
    """What is cached where."""

    def cached(self, key: TargetKey, prefixes: Sequence[Prefix]) -> int:
        """Returns how many tokens of the longest known prefix an engine probably has."""
        ...


class PrefixCacheScorer:
    """Rates engines by the share of the prompt that this router has sent there of late."""

    name = "prefix-cache"

    def __init__(self, cached: Cached) -> None:
        self._cached = cached

    def score(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[float]:
        """Returns that share."""
        token_count = max(demand.token_count, 1)
        return [self._cached.cached(target.key, demand.prefixes) / token_count for target in targets]


_: type[Scorer] = PrefixCacheScorer
