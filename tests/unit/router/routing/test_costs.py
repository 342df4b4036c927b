"""What legs cost on each target."""

import math
import random
from collections.abc import Callable
from statistics import median

import pytest

from backhaul_router.core.routing.costs import MAX_TARGETS, Costs
from backhaul_router.core.routing.fits import HALF_LIFE_S
from backhaul_router.core.routing.target import TargetKey
from tests.unit.router.routing.served import Now

A, B, C, D = [(f"p{number}", "engine") for number in range(4)]


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def costs(now: Now) -> Costs:
    return Costs(now)


def cost_s(computed: int, read: int = 0, *, slow: float = 1.0) -> float:
    """Returns what legs cost on the engines of these tests; figures are far from the priors."""
    return (0.03 + computed * 4e-4 + read * 2e-5) * slow


class Legs:
    """Legs of random lengths on targets that are alike but for a factor."""

    def __init__(self, costs: Costs, now: Now, *, seed: int = 1, noise: float = 0.2) -> None:
        self._costs = costs
        self._now = now
        self._rng = random.Random(seed)
        self._noise = noise

    def run(self, key: TargetKey, count: int = 1, *, slow: float = 1.0, reads: bool = False) -> None:
        for _ in range(count):
            self._now.value += 0.5
            computed = int(10 ** self._rng.uniform(1.5, 4))
            read = self._rng.randint(1000, 20_000) if reads else 0
            seconds = cost_s(computed, read, slow=slow) * self._rng.lognormvariate(0, self._noise)
            self._costs.note_prefill(key, computed=computed, read=read, seconds=seconds)

    def factor(self, key: TargetKey, computed: int = 1000, read: int = 0) -> float:
        """Returns what a leg is expected to cost, over what it does."""
        return self._costs.prefill_s(key, computed=computed, read=read) / cost_s(computed, read)


@pytest.fixture
def legs(costs: Costs, now: Now) -> Legs:
    return Legs(costs, now)


# Before anything is known


def test_what_nobody_tried_costs_little(costs: Costs) -> None:
    assert costs.prefill_s(A, computed=1000, read=2000) == pytest.approx(0.02 + 0.05 + 0.01)
    assert costs.decode_s(A, moved=2000) == pytest.approx(0.02 + 0.01)
    assert costs.alone_s(A, computed=1000) == pytest.approx(0.02 + 0.05)


def test_a_hand_off_that_nobody_tried_costs_little_whatever_prompts_cost(costs: Costs, legs: Legs) -> None:
    legs.run(A, 50, slow=10)
    assert costs.decode_s(A, moved=2000) == pytest.approx(0.03)


def test_a_decode_engine_that_nobody_left_alone_computes_like_others_and_answers_as_it_does(costs: Costs) -> None:
    for count in (100, 4000, 300, 9000, 1000, 2000) * 5:
        costs.note_prefill(A, computed=count, read=0, seconds=0.01 + count * 5e-4)
        costs.note_decode(B, moved=count, seconds=0.2 + count * 1e-6)
    assert costs.alone_s(B, computed=0) == pytest.approx(0.2, rel=0.15)
    assert costs.alone_s(B, computed=1000) == pytest.approx(0.7, rel=0.15)


@pytest.mark.parametrize("seconds", [10.0, 30.0, 300.0])
def test_a_first_leg_hardly_counts_when_it_took_absurdly_long(costs: Costs, seconds: float) -> None:
    costs.note_alone(A, computed=1000, seconds=seconds)
    assert costs.alone_s(A, computed=1000) < 1.0
    assert costs.alone_s(B, computed=1000) < 1.0
    costs.note_alone(A, computed=1000, seconds=0.1)
    costs.note_alone(A, computed=1000, seconds=0.1)
    assert costs.alone_s(A, computed=1000) < 0.3


# Learning


@pytest.mark.parametrize("slow", [0.2, 1.0, 5.0, 100.0])
def test_a_handful_of_legs_show_what_a_target_costs(costs: Costs, legs: Legs, slow: float) -> None:
    legs.run(A, 8, slow=slow)
    assert legs.factor(A) / slow == pytest.approx(1.0, abs=0.3)


def test_each_kind_of_leg_is_learnt(costs: Costs) -> None:
    for count in (100, 4000, 300, 9000, 1000, 2000) * 3:
        costs.note_prefill(A, computed=count, read=10_000 - count, seconds=cost_s(count, 10_000 - count))
        costs.note_decode(A, moved=count, seconds=0.005 + count * 1e-6)
        costs.note_alone(A, computed=count, seconds=0.1 + count * 1e-3)
    assert costs.prefill_s(A, computed=500, read=5000) == pytest.approx(cost_s(500, 5000), rel=0.1)
    assert costs.decode_s(A, moved=500) == pytest.approx(0.0055, rel=0.1)
    assert costs.alone_s(A, computed=500) == pytest.approx(0.6, rel=0.1)


def test_reading_and_computing_are_told_apart(costs: Costs, legs: Legs) -> None:
    for _ in range(40):
        legs.run(A)
        legs.run(A, reads=True)
    assert legs.factor(A, computed=8000) == pytest.approx(1.0, abs=0.15)
    assert legs.factor(A, computed=50, read=20_000) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("seed", range(5))
def test_targets_of_different_speeds_are_foreseen_within_a_tenth(costs: Costs, now: Now, seed: int) -> None:
    rng = random.Random(seed)
    each = {f"p{i}": (rng.uniform(0.01, 0.1), rng.uniform(5e-5, 1e-3), rng.uniform(2e-6, 5e-5)) for i in range(8)}
    misses = []
    for step in range(60):
        for node_id, parts in each.items():
            now.value += 0.05
            computed, read = int(10 ** rng.uniform(1, 4)), rng.choice([0, rng.randint(100, 20_000)])
            seconds = parts[0] + computed * parts[1] + read * parts[2]
            foreseen = costs.prefill_s((node_id, ""), computed=computed, read=read)
            if step >= 30:
                misses.append(abs(foreseen / seconds - 1))
            noisy = seconds * rng.lognormvariate(0, 0.2)
            costs.note_prefill((node_id, ""), computed=computed, read=read, seconds=noisy)
    assert median(misses) < 0.1
    assert sorted(misses)[len(misses) * 9 // 10] < 0.3


# Peers


def test_a_new_target_costs_what_its_peers_do(costs: Costs, legs: Legs) -> None:
    for key in (A, B, C) * 15:
        legs.run(key)
    assert legs.factor(D) == pytest.approx(1.0, abs=0.25)


def test_a_first_leg_that_took_long_does_not_condemn_a_new_target(costs: Costs, legs: Legs) -> None:
    for key in (A, B, C) * 15:
        legs.run(key)
    legs.run(D, slow=40)
    assert legs.factor(D) < 2
    legs.run(D, 3)
    assert legs.factor(D) == pytest.approx(1.0, abs=0.3)


def test_a_new_target_that_differs_from_its_peers_is_soon_known(costs: Costs, legs: Legs) -> None:
    for key in (A, B, C) * 15:
        legs.run(key)
    legs.run(D, 4, slow=8)
    assert legs.factor(D) / 8 == pytest.approx(1.0, abs=0.3)
    assert legs.factor(A) == pytest.approx(1.0, abs=0.3)


def test_one_slow_target_of_four_does_not_stand_for_all(costs: Costs, legs: Legs) -> None:
    for _ in range(20):
        for key in (A, B, C):
            legs.run(key)
        legs.run(D, slow=10)
    assert legs.factor(("new", "")) < 3
    assert legs.factor(D) > 7


@pytest.mark.parametrize("legs_long", [5, 100, 5000])
def test_what_a_target_has_shown_is_believed_for_as_long_as_it_was_so(legs_long: int, now: Now, legs: Legs) -> None:
    for key in (A, B, C) * 10:
        legs.run(key)
    begun = now.value
    legs.run(D, legs_long, slow=16)
    half_life_s = min(max(now.value - begun, 10.0), HALF_LIFE_S)
    learnt = now.value
    after = []
    for part in (0.0, 0.3, 1.0, 2.0):
        while now.value < learnt + part * half_life_s:
            now.value += half_life_s / 30
            legs.run(A)
        after.append(legs.factor(D))
    assert after == pytest.approx([16, 13, 4, 1.2], rel=0.35)


def test_one_leg_shows_that_a_target_is_as_slow_as_ever(now: Now, legs: Legs) -> None:
    for key in (A, B, C) * 10:
        legs.run(key)
    legs.run(D, 10, slow=16)
    for _ in range(60):
        now.value += 1
        legs.run(A)
    assert legs.factor(D) < 1.5
    legs.run(D, slow=16)
    assert legs.factor(D) > 10
    now.value += 40
    assert legs.factor(D) > 7


def test_a_target_that_was_slow_for_a_moment_is_known_as_fast_after_few_legs(now: Now, legs: Legs) -> None:
    for key in (A, B, C, D) * 10:
        legs.run(key)
    legs.run(D, 3, slow=25)
    assert legs.factor(D) > 10
    now.value += 30
    assert legs.factor(D) < 3
    legs.run(D, 3)
    assert legs.factor(D) == pytest.approx(1, rel=0.35)


def test_where_nobody_has_run_a_leg_for_long_it_costs_little_again(costs: Costs, now: Now, legs: Legs) -> None:
    legs.run(A, 20, slow=10)
    now.value += 20 * HALF_LIFE_S
    assert costs.prefill_s(A, computed=1000, read=2000) == pytest.approx(0.08, rel=0.01)


# Changes


@pytest.mark.parametrize("slow", [3.0, 10.0, 100.0, 1 / 10])
def test_a_target_that_changes_is_followed_within_five_legs(costs: Costs, legs: Legs, slow: float) -> None:
    legs.run(A, 200)
    legs.run(A, 5, slow=slow)
    assert legs.factor(A) / slow == pytest.approx(1.0, abs=0.3)


def test_a_slight_change_is_followed_too(costs: Costs, legs: Legs) -> None:
    legs.run(A, 200)
    legs.run(A, 15, slow=1.6)
    assert legs.factor(A) == pytest.approx(1.6, abs=0.3)


def test_reads_that_become_slow_are_noticed_among_legs_that_read_nothing(costs: Costs, legs: Legs) -> None:
    for _ in range(100):
        legs.run(A, 2)
        legs.run(A, reads=True)
    for _ in range(6):
        costs.note_prefill(A, computed=100, read=20_000, seconds=cost_s(100, 20_000 * 10))
        legs.run(A, 2)
    assert legs.factor(A, computed=100, read=20_000) > 5
    assert legs.factor(A, computed=8000) < 1.4


@pytest.mark.parametrize("factor", [50.0, 1000.0, 1 / 50])
@pytest.mark.parametrize("seed", range(5))
def test_one_leg_that_is_far_off_is_an_accident(costs: Costs, now: Now, seed: int, factor: float) -> None:
    legs = Legs(costs, now, seed=seed)
    legs.run(A, 40)
    before = legs.factor(A)
    legs.run(A, slow=factor)
    for _ in range(10):
        assert 1 / 1.5 < legs.factor(A) / before < 1.5
        legs.run(A)


def test_accidents_now_and_then_are_no_change(costs: Costs, legs: Legs) -> None:
    legs.run(A, 40)
    for slow in (50.0, 40.0, 1 / 50, 30.0):
        legs.run(A, slow=slow)
        legs.run(A, 10)
        assert legs.factor(A) == pytest.approx(1.0, abs=0.35)


def test_two_accidents_of_opposite_kinds_are_no_change(costs: Costs, legs: Legs) -> None:
    legs.run(A, 40)
    for slow in (50.0, 1 / 50):
        legs.run(A, slow=slow)
    assert legs.factor(A) == pytest.approx(1.0, abs=0.4)


# Steps


def test_legs_of_one_step_are_taken_together(costs: Costs, now: Now) -> None:
    for _ in range(20):
        for seconds in (0.8, 0.0, 0.001, 0.0005, 0.0, 0.0, 0.002, 0.0):
            now.value += seconds
            costs.note_prefill(A, computed=1000, read=0, seconds=seconds)
    assert costs.prefill_s(A, computed=1000, read=0) == pytest.approx(0.1, rel=0.1)
    assert costs.prefill_s(B, computed=1000, read=0) == pytest.approx(0.1, rel=0.2)


def test_what_happens_on_one_target_in_between_does_not_part_the_legs_of_another_ones_step(
    costs: Costs, now: Now
) -> None:
    for _ in range(20):
        now.value += 0.4
        for seconds in (0.4, 0.0, 0.0, 0.0):
            costs.note_prefill(A, computed=1000, read=0, seconds=seconds)
            costs.note_prefill(B, computed=1000, read=0, seconds=0.1)
    for key in (A, B, C):
        assert costs.prefill_s(key, computed=1000, read=0) == pytest.approx(0.1, rel=0.2)


# How long legs typically are


def test_a_typical_leg_is_like_those_of_late(costs: Costs) -> None:
    for _ in range(100):
        costs.note_prefill(A, computed=4000, read=0, seconds=cost_s(4000))
        costs.note_alone(A, computed=100, seconds=0.05)
    assert costs.typical_prefill_s(A) == pytest.approx(cost_s(4000), rel=0.1)
    assert costs.typical_alone_s(A) == pytest.approx(0.05, rel=0.1)


# Bounds

Note = Callable[[Costs, int, float], None]
NOTES: dict[str, Note] = {
    "prefill": lambda costs, tokens, seconds: costs.note_prefill(A, computed=tokens, read=tokens, seconds=seconds),
    "decode": lambda costs, tokens, seconds: costs.note_decode(A, moved=tokens, seconds=seconds),
    "alone": lambda costs, tokens, seconds: costs.note_alone(A, computed=tokens, seconds=seconds),
}


def sane(costs: Costs) -> bool:
    counts = (-(10**18), 0, 1, 10_000, 10**18)
    figures = [costs.prefill_s(A, computed=computed, read=read) for computed in counts for read in counts]
    figures += [costs.decode_s(A, moved=count) for count in counts]
    figures += [costs.alone_s(A, computed=count) for count in counts]
    return all(0 < figure <= 3600 for figure in figures)


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_fed_in_figures_stay_above_zero_and_finite(costs: Costs, now: Now, note: Note, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        now.value += rng.choice([0, 0.001, 1, 1e6])
        tokens = rng.choice([-5, 0, 1, 1000, 10**7, 10**300])
        note(costs, tokens, rng.choice([0.0, 1e-300, 1e-3, 1.0, 3600.0, 1e300, -1.0, math.nan, math.inf]))
        assert sane(costs)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -0.001])
@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_times_that_cannot_be_teach_nothing(costs: Costs, note: Note, seconds: float) -> None:
    for _ in range(3):
        note(costs, 1000, seconds)
    assert costs.prefill_s(A, computed=1000, read=0) == pytest.approx(0.07)
    assert costs.decode_s(A, moved=2000) == pytest.approx(0.03)
    assert costs.alone_s(A, computed=1000) == pytest.approx(0.07)


def test_so_many_targets_are_remembered_and_the_one_noted_longest_ago_goes_first(costs: Costs, legs: Legs) -> None:
    legs.run(A, 5, slow=20)
    legs.run(B, 5, slow=20)
    for number in range(MAX_TARGETS - 2):
        costs.note_prefill((str(number), ""), computed=1000, read=0, seconds=cost_s(1000))
    legs.run(A, slow=20)
    costs.note_prefill(C, computed=1000, read=0, seconds=cost_s(1000))
    assert legs.factor(A) > 10
    assert legs.factor(B) < 5


def test_nodes_that_have_left_are_forgotten(costs: Costs, legs: Legs) -> None:
    for _ in range(20):
        for key in (A, B, C):
            legs.run(key)
        legs.run(D, slow=10)
    costs.forget({A[0], B[0], C[0]})
    assert legs.factor(D) < 3
    assert legs.factor(A) == pytest.approx(1.0, abs=0.3)
