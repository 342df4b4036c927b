"""On seeded loads the chosen routes are hardly ever worse than the best fixed policy, and better where loads are mixed.

The loads are those of `benchmarks.routing`, on engines in virtual time: nothing but the code makes a difference. When
a change makes this fail, `play` tells each turn's way and estimate.
"""

from collections.abc import Sequence
from functools import cache
from statistics import fmean

import pytest

from backhaul_router.core.routing import shortlist
from backhaul_router.core.turn import Route
from benchmarks.routing.clusters import DECODE, PREFILL, Cluster
from benchmarks.routing.loads import LOADS, Load
from tests.fakes import virtual_load
from tests.fakes.virtual_load import play
from tests.fakes.virtual_router import Asked

SEEDS = ("a", "b", "c")
DURATION_S = 40.0
FIXED = tuple(route.value for route in Route)
MOST_WORSE = 1.05


@cache
def played(load: str, policy: str) -> Sequence[Asked]:
    """Returns all turns of a load; all seeds together."""
    return [turn for seed in SEEDS for turn in play(LOADS[load], seed=seed, duration_s=DURATION_S, policy=policy)]


def mean_ttft_s(load: str, policy: str) -> float:
    return fmean(turn.ttft_s for turn in played(load, policy))


@pytest.mark.parametrize("load", LOADS)
def test_chosen_routes_are_hardly_worse_than_the_best_fixed_policy(load: str) -> None:
    times = {policy: mean_ttft_s(load, policy) for policy in ("auto", *FIXED)}
    assert times["auto"] < MOST_WORSE * min(times[policy] for policy in FIXED), times


@pytest.mark.parametrize("policy", FIXED)
def test_on_a_mixed_load_they_are_better_than_every_fixed_policy(policy: str) -> None:
    assert mean_ttft_s("mixed", "auto") < mean_ttft_s("mixed", policy)


@pytest.mark.parametrize("policy", ["warm", "append"])
def test_what_is_held_is_worth_going_for(policy: str) -> None:
    assert mean_ttft_s("mixed", policy) < mean_ttft_s("mixed", "cold")


def test_every_policy_takes_the_ways_it_has() -> None:
    ways = {policy: {turn.way for turn in played("mixed", policy)} for policy in ("auto", *FIXED)}
    assert ways == {
        "auto": {"cold", "alone", "warm", "append"},
        "cold": {"cold"},
        "warm": {"cold", "warm"},
        "append": {"cold", "append"},
    }


def test_a_load_that_is_played_again_is_the_same() -> None:
    turns = [play(LOADS["chat"], seed="a", duration_s=10.0) for _ in range(2)]
    assert [(turn.way, turn.ttft_s) for turn in turns[0]] == [(turn.way, turn.ttft_s) for turn in turns[1]]


@pytest.mark.parametrize("slower", [1, 3])
def test_rating_few_of_many_engines_is_hardly_worse_than_rating_all(
    slower: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = 12
    some = [each.slower(slower) for each in (PREFILL, DECODE)]
    prefill, decode = (
        (one,) * 3 + (other,) * (engines - 3) for one, other in zip(some, (PREFILL, DECODE), strict=True)
    )
    monkeypatch.setattr(virtual_load, "CLUSTERS", {"large": Cluster(prefill=prefill, decode=decode)})
    rates = {kind: per_s * engines / 2 for kind, per_s in LOADS["mixed"].per_s.items()}
    load = Load(name="large", per_s=rates, cluster="large")
    few = fmean(turn.ttft_s for turn in play(load, seed="a", duration_s=8.0))
    monkeypatch.setattr(shortlist, "ALL", engines)
    assert few < MOST_WORSE * fmean(turn.ttft_s for turn in play(load, seed="a", duration_s=8.0))
