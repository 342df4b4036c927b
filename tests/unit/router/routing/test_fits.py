"""What work costs as a sum of parts."""

import math
import random

import pytest

from backhaul_router.core.routing.fits import HALF_LIFE_S, Fit, Prior, Spread, Triple

PRIOR = Prior(1e-2, 1e-4, 1e-5)
WIDE = Spread(common=2.0, own=1.0)


@pytest.fixture
def fit() -> Fit:
    return Fit(PRIOR, PRIOR, WIDE, noise=0.1)


def teach(fit: Fit, counts: Triple, seconds: float, now: float = 0.0) -> None:
    reading = fit.read(counts, seconds, now)
    fit.learn(reading, reading.surprise)


def parts(fit: Fit, now: float = 0.0) -> list[float]:
    return [math.exp(part) for part in fit.logs(now)]


def test_what_nobody_taught_costs_what_the_prior_says(fit: Fit) -> None:
    assert fit.expected_s((1, 100, 1000), now=5.0) == pytest.approx(0.03)


def test_the_parts_are_found(fit: Fit) -> None:
    rng = random.Random(1)
    for _ in range(100):
        counts = (1, rng.randint(0, 1000), rng.randint(0, 10_000))
        teach(fit, counts, 5e-2 + 4e-4 * counts[1] + 3e-5 * counts[2])
    assert parts(fit) == pytest.approx([5e-2, 4e-4, 3e-5], rel=0.1)


@pytest.mark.parametrize("factor", [1e-2, 0.1, 10.0, 1e4])
def test_one_piece_moves_all_parts_nearly_as_far_as_it_says(fit: Fit, factor: float) -> None:
    teach(fit, (1, 100, 1000), 0.03 * factor)
    assert fit.expected_s((1, 100, 1000), 0.0) == pytest.approx(0.03 * factor, rel=0.1)
    assert math.log(fit.expected_s((1, 0, 0), 0.0) / 1e-2) == pytest.approx(math.log(factor), rel=0.25)


def test_half_of_what_was_learnt_is_left_after_the_half_life(fit: Fit) -> None:
    teach(fit, (1, 0, 0), 1.0, now=7.0)
    learnt = fit.expected_s((1, 0, 0), 7.0)
    faded = fit.expected_s((1, 0, 0), 7.0 + HALF_LIFE_S)
    assert faded == pytest.approx(math.sqrt(learnt * 1e-2))
    assert fit.expected_s((1, 0, 0), 7.0 + 40 * HALF_LIFE_S) == pytest.approx(1e-2)


def test_a_fit_fades_towards_where_its_centre_is_now(fit: Fit) -> None:
    one = Fit(PRIOR, fit, WIDE, noise=0.1)
    teach(one, (1, 0, 0), 1.0)
    teach(fit, (1, 0, 0), 0.5, now=40 * HALF_LIFE_S)
    seconds = one.expected_s((1, 0, 0), 40 * HALF_LIFE_S)
    assert seconds == pytest.approx(fit.expected_s((1, 0, 0), 40 * HALF_LIFE_S))
    assert seconds == pytest.approx(0.5, rel=0.1)


def test_parts_of_which_no_piece_tells_fade_with_the_pieces(fit: Fit) -> None:
    for _ in range(5):
        teach(fit, (1, 0, 10_000), 10.0)
    learnt = parts(fit)[2]
    for _ in range(3000):
        teach(fit, (1, 100, 0), 0.02)
    assert learnt > 20e-5
    assert parts(fit)[2] < 2e-5


def test_a_piece_says_more_when_little_is_known(fit: Fit) -> None:
    moves = []
    for _ in range(20):
        before = fit.expected_s((1, 0, 0), 0.0)
        teach(fit, (1, 0, 0), before * 2)
        moves.append(fit.expected_s((1, 0, 0), 0.0) / before)
    assert moves[0] > 1.9
    assert moves[0] > moves[1] > moves[2]
    assert moves[-1] < 1.5


def test_a_piece_says_more_again_once_it_is_known_that_the_work_has_changed(fit: Fit) -> None:
    for _ in range(50):
        teach(fit, (1, 0, 0), 0.01)
    fit.loosen(WIDE, 0.0)
    teach(fit, (1, 0, 0), 0.1)
    assert fit.expected_s((1, 0, 0), 0.0) == pytest.approx(0.1, rel=0.1)


def test_a_piece_says_less_where_pieces_differ_widely() -> None:
    rng, moves = random.Random(1), []
    for noise in (0.05, 0.6):
        fit = Fit(PRIOR, PRIOR, WIDE, noise=0.1)
        for _ in range(200):
            teach(fit, (1, 0, 0), 0.01 * rng.lognormvariate(0, noise))
        before = fit.expected_s((1, 0, 0), 0.0)
        teach(fit, (1, 0, 0), before * 2)
        moves.append(fit.expected_s((1, 0, 0), 0.0) / before)
    assert moves[1] < moves[0]


def test_no_pieces_make_parts_vanish_or_grow_without_bound(fit: Fit) -> None:
    for seconds, count in [(1e-5, 10**7), (3600.0, 0)] * 50 + [(1e-5, 10**7)] * 500 + [(3600.0, 0)] * 500:
        teach(fit, (1, count, count), seconds)
        assert all(1e-7 * 0.99 < part < 1e3 * 1.01 for part in parts(fit))
