"""Means, and how sure they are."""

import pytest

from benchmarks.routing.figures import Timed, errors_of, figures_of, ratio_of
from benchmarks.routing.turn_log import Estimated


def turns(**times: list[float]) -> list[Timed]:
    return [
        Timed(conversation=name, route="cold", ttft_s=ttft_s) for name, all_of in times.items() for ttft_s in all_of
    ]


def test_figures_are_over_turns() -> None:
    figures = figures_of(turns(a=[0.1, 0.2], b=[0.6]))
    assert figures.turn_count == 3
    assert figures.mean_ttft_s == pytest.approx(0.3)
    assert (figures.median_ttft_s, figures.p95_ttft_s) == (0.2, 0.6)


def test_routes_are_shares_of_turns() -> None:
    seen = [Timed(conversation="a", route=route, ttft_s=0.1) for route in ("warm", "append", "append", "append")]
    assert figures_of(seen).routes == {"append": 0.75, "warm": 0.25}


def test_a_ratio_is_that_of_the_means() -> None:
    ratio = ratio_of(turns(a=[0.1], b=[0.2, 0.3]), turns(a=[0.2], b=[0.4, 0.6]))
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_ratio_is_the_less_sure_the_more_conversations_differ() -> None:
    sure = ratio_of(turns(a=[0.1], b=[0.1], c=[0.1]), turns(a=[0.2], b=[0.2], c=[0.2]))
    unsure = ratio_of(turns(a=[0.1], b=[0.1], c=[0.1]), turns(a=[0.1], b=[0.2], c=[0.3]))
    assert sure.value == pytest.approx(unsure.value)
    assert sure.high - sure.low == pytest.approx(0.0)
    assert unsure.low < 0.45
    assert unsure.high > 0.7


def test_only_conversations_of_both_arms_count() -> None:
    assert ratio_of(turns(a=[0.1], b=[9.0]), turns(a=[0.2], c=[9.0])).value == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no conversation in common"):
        ratio_of(turns(a=[0.1]), turns(b=[0.1]))


def test_the_same_seed_gives_the_same_interval() -> None:
    ours, theirs = turns(a=[0.1], b=[0.3], c=[0.2]), turns(a=[0.2], b=[0.3], c=[0.4])
    assert ratio_of(ours, theirs, seed="x") == ratio_of(ours, theirs, seed="x")


def test_estimates_are_off_by_what_turns_took_more() -> None:
    errors = errors_of([Estimated(estimate_s=0.1, ttft_s=0.3), Estimated(estimate_s=0.2, ttft_s=0.1)])
    assert (errors.mean_s, errors.mean_absolute_s) == pytest.approx((0.05, 0.15))
