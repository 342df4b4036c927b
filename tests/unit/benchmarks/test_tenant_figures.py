"""Telling lists of times apart."""

from random import Random

import pytest

from benchmarks.tenants.figures import Comparison


@pytest.mark.parametrize(
    ("there", "nowhere", "share"),
    [([1.0, 2.0], [3.0, 4.0], 0.0), ([3.0, 4.0], [1.0, 2.0], 1.0), ([1.0, 1.0], [1.0], 0.5), ([1, 4], [2, 3], 0.5)],
)
def test_the_share_is_how_often_one_of_the_first_is_longer(
    there: list[float], nowhere: list[float], share: float
) -> None:
    assert Comparison(there, nowhere).share == share


def test_times_of_one_kind_are_not_told_apart_and_a_tenth_of_their_spread_more_is() -> None:
    rng = Random(1)
    times = [[rng.gauss(50, 5) for _ in range(5_000)] for _ in range(2)]
    assert not Comparison(*times).tells
    assert Comparison([time_s + 0.5 for time_s in times[0]], times[1]).tells


def test_medians_are_told_in_milliseconds() -> None:
    assert Comparison([0.001, 0.003, 0.002], [0.005]).medians_ms == (2.0, 5.0)
