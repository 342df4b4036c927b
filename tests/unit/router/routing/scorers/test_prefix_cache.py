"""The more of a prompt an engine has cached, the better."""

from collections.abc import Sequence

from backhaul_router.core.routing.demand import Leg, Prefix
from backhaul_router.core.routing.scorers.prefix_cache import PrefixCacheScorer
from backhaul_router.core.routing.target import TargetKey
from tests.unit.router.routing.targets import demand, target

PROMPT = (Prefix("all", 1000), Prefix("most", 750), Prefix("tools", 250))


class FakeCache:
    """Keys of prefixes by node."""

    def __init__(self, keys: dict[str, set[str]]) -> None:
        self._keys = keys

    def cached(self, key: TargetKey, prefixes: Sequence[Prefix]) -> int:
        known = self._keys.get(key[0], set())
        return next((prefix.token_count for prefix in prefixes if prefix.key in known), 0)


def test_an_engine_is_worth_the_share_of_the_prompt_that_it_has() -> None:
    scorer = PrefixCacheScorer(FakeCache({"p1": {"most", "tools"}, "p2": {"tools"}}))
    asked = demand(prefixes=PROMPT)
    assert scorer.score(asked, Leg.PREFILL, [target("p1"), target("p2"), target("p3")]) == [0.75, 0.25, 0.0]


def test_a_prompt_of_nothing_is_cached_nowhere() -> None:
    assert PrefixCacheScorer(FakeCache({})).score(demand(token_count=0), Leg.PREFILL, [target("p1")]) == [0.0]
