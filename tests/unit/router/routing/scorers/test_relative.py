"""Scores say how much worse than the best one each is."""

import math

import pytest

from backhaul_router.core.routing.scorers.relative import known_or_average, least_is_best


@pytest.mark.parametrize(
    ("amounts", "scores"),
    [
        ([2.0, 1.0, 4.0], [0.5, 1.0, 0.25]),
        ([0.0, 1.0], [1.0, 0.0]),
        ([0.0, 0.0], [1.0, 1.0]),
        ([math.inf, 1.0], [0.0, 1.0]),
        ([math.inf, math.inf], [1.0, 1.0]),
    ],
)
def test_the_least_amount_is_best(amounts: list[float], scores: list[float]) -> None:
    assert least_is_best(amounts) == scores


@pytest.mark.parametrize(
    ("amounts", "filled"),
    [([1.0, None, 3.0], [1.0, 2.0, 3.0]), ([None, None], [0.0, 0.0]), ([5.0], [5.0])],
)
def test_what_is_unknown_is_average(amounts: list[float | None], filled: list[float]) -> None:
    assert known_or_average(amounts) == filled
