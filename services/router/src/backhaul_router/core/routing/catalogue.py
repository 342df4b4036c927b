"""All plugins there are, by the names that the routing file uses."""

from collections.abc import Callable, Mapping, Sequence

from backhaul_router.core.routing.filters.compatible import CompatibleFilter
from backhaul_router.core.routing.filters.healthy import HealthyFilter
from backhaul_router.core.routing.filters.max_waiting import MaxWaitingFilter
from backhaul_router.core.routing.filters.model import ModelFilter
from backhaul_router.core.routing.filters.pairs_apart import PairsApartFilter
from backhaul_router.core.routing.filters.ready import ReadyFilter
from backhaul_router.core.routing.filters.role import RoleFilter
from backhaul_router.core.routing.filters.untried import UntriedFilter
from backhaul_router.core.routing.live import Live
from backhaul_router.core.routing.pickers.best import BestPicker
from backhaul_router.core.routing.pickers.power_of_two import PowerOfTwoPicker
from backhaul_router.core.routing.pickers.weighted_random import WeightedRandomPicker
from backhaul_router.core.routing.plugin import Filter, Picker, Scorer
from backhaul_router.core.routing.scorers.holder import HolderScorer
from backhaul_router.core.routing.scorers.kv_room import KvRoomScorer
from backhaul_router.core.routing.scorers.least_running import LeastRunningScorer
from backhaul_router.core.routing.scorers.least_waiting import LeastWaitingScorer
from backhaul_router.core.routing.scorers.prefix_cache import PrefixCacheScorer
from backhaul_router.core.routing.scorers.time import TimeScorer

REQUIRED: Sequence[type[Filter]] = (RoleFilter, ModelFilter, ReadyFilter, CompatibleFilter)
"""Filters without which turns fail. They always run, first, in this order."""

FILTERS: Mapping[str, Callable[[Live, int], Filter]] = {
    PairsApartFilter.name: lambda live, max_waiting: PairsApartFilter(live.pairs),
    UntriedFilter.name: lambda live, max_waiting: UntriedFilter(),
    HealthyFilter.name: lambda live, max_waiting: HealthyFilter(live.breakers),
    MaxWaitingFilter.name: lambda live, max_waiting: MaxWaitingFilter(live.reports, limit=max_waiting),
}

SCORERS: Mapping[str, Callable[[Live], Scorer]] = {
    TimeScorer.name: lambda live: TimeScorer(live.estimator),
    LeastRunningScorer.name: lambda live: LeastRunningScorer(live.load),
    LeastWaitingScorer.name: lambda live: LeastWaitingScorer(live.reports),
    KvRoomScorer.name: lambda live: KvRoomScorer(live.reports),
    PrefixCacheScorer.name: lambda live: PrefixCacheScorer(live.prefixes),
    HolderScorer.name: lambda live: HolderScorer(),
}

PICKERS: Mapping[str, Callable[[Live], Picker]] = {
    BestPicker.name: lambda live: BestPicker(live.recency),
    PowerOfTwoPicker.name: lambda live: PowerOfTwoPicker(live.rng),
    WeightedRandomPicker.name: lambda live: WeightedRandomPicker(live.rng),
}
