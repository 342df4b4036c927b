"""How long conversations are silent, as learnt from those that came back and those that did not."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_node_agent.core.retention.gaps import EDGES_S, MAX_SCOPES, PRIORS, Crowd, Gaps, Pace, pace_after

FAST = Crowd("scope", Pace.FAST)
DAY_S = 86_400.0

ages = st.floats(min_value=0.0, max_value=4_000.0)
observations = st.lists(st.tuples(st.booleans(), ages), max_size=60)


def _learnt(seen: list[tuple[bool, float]], crowd: Crowd = FAST) -> Gaps:
    gaps = Gaps()
    for returned, age_s in seen:
        (gaps.returned if returned else gaps.silent)(crowd, age_s, 0.0)
    return gaps


@pytest.mark.parametrize(
    ("gap_s", "pace"),
    [
        (None, Pace.FIRST),
        (0.0, Pace.FAST),
        (5.0, Pace.STEADY),
        (30.0, Pace.SLOW),
        (300.0, Pace.IDLE),
        (1e9, Pace.IDLE),
    ],
)
def test_the_pace_is_that_of_the_last_gap(gap_s: float | None, pace: Pace) -> None:
    assert pace_after(gap_s) is pace


@pytest.mark.parametrize("pace", Pace)
def test_before_anything_was_seen_the_prior_holds(pace: Pace) -> None:
    prior = PRIORS[pace]
    for within_s in (1.0, 10.0, 100.0, 1_000.0):
        believed = Gaps().chance(Crowd("scope", pace), 0.0, within_s)
        assert believed == pytest.approx(1 - prior.survival(within_s), abs=0.02)


def test_what_always_comes_back_after_a_second_is_expected_then_and_not_later() -> None:
    gaps = _learnt([(True, 1.0)] * 500)
    assert gaps.chance(FAST, 0.0, 2.0) > 0.95
    assert gaps.rate(FAST, 0.5) > 20 * gaps.rate(FAST, 5.0)


def test_what_was_watched_in_vain_lowers_the_chance() -> None:
    assert _learnt([(False, 600.0)] * 50).chance(FAST, 0.0, 600.0) < Gaps().chance(FAST, 0.0, 600.0) / 2


def test_what_was_watched_for_a_short_time_says_nothing_of_later_ages() -> None:
    seen = [(True, 60.0)] * 100
    cut_off = [(False, 1.0)] * 1_000
    assert _learnt(seen + cut_off).chance(FAST, 10.0, 90.0) == pytest.approx(_learnt(seen).chance(FAST, 10.0, 90.0))


def test_the_share_that_returns_is_right_when_many_were_watched_for_different_times() -> None:
    # Half of all return after 100 s; a third of the others were given up before, the rest after.
    seen = [(True, 100.0)] * 300 + [(False, 20.0)] * 200 + [(False, 1_000.0)] * 300
    assert _learnt(seen).chance(FAST, 0.0, 500.0) == pytest.approx(0.5, abs=0.05)


def test_what_outlasts_an_hour_is_not_expected_back() -> None:
    gaps = _learnt([(True, 1e6)] * 100)
    assert gaps.rate(FAST, 3_600.0) == 0.0
    assert gaps.rate(FAST, 1e9) == 0.0
    assert gaps.chance(FAST, 1e9, 1e9) == 0.0


def test_old_observations_fade() -> None:
    gaps = _learnt([(True, 1.0)] * 200)
    for _ in range(200):
        gaps.silent(FAST, 100.0, DAY_S)
    fresh = _learnt([(True, 1.0)] * 200 + [(False, 100.0)] * 200)
    assert gaps.chance(FAST, 0.0, 2.0) < 0.15 < 0.4 < fresh.chance(FAST, 0.0, 2.0)


def test_observations_fade_alike_over_years_in_small_steps() -> None:
    gaps = Gaps()
    for day in range(2_000):
        for _ in range(10):
            gaps.returned(FAST, 1.0, day * DAY_S)
    assert gaps.chance(FAST, 0.0, 2.0) == pytest.approx(0.75, abs=0.1)


def test_a_clock_that_stands_still_or_steps_back_fades_nothing() -> None:
    gaps = Gaps()
    gaps.returned(FAST, 1.0, DAY_S)
    gaps.returned(FAST, 1.0, 0.0)
    assert gaps.chance(FAST, 0.0, 2.0) > Gaps().chance(FAST, 0.0, 2.0)


def test_a_scope_that_was_never_seen_is_as_the_others_of_its_pace() -> None:
    gaps = _learnt([(True, 1.0)] * 200)
    other = Crowd("other", Pace.FAST)
    assert gaps.chance(other, 0.0, 2.0) > 0.9
    assert gaps.chance(Crowd("other", Pace.SLOW), 0.0, 2.0) == Gaps().chance(Crowd("other", Pace.SLOW), 0.0, 2.0)


def test_a_scope_with_few_observations_leans_on_the_others_and_with_many_stands_alone() -> None:
    gaps = _learnt([(True, 1.0)] * 500)
    other = Crowd("other", Pace.FAST)
    gaps.silent(other, 600.0, 0.0)
    assert gaps.chance(other, 0.0, 2.0) > 0.8
    for _ in range(500):
        gaps.silent(other, 600.0, 0.0)
    assert gaps.chance(other, 0.0, 2.0) < 0.1


def test_two_scopes_are_told_apart() -> None:
    tools, people = Crowd("tools", Pace.FAST), Crowd("people", Pace.FAST)
    gaps = Gaps()
    for _ in range(300):
        gaps.returned(tools, 0.5, 0.0)
        gaps.silent(tools, 600.0, 0.0)
        gaps.returned(people, 120.0, 0.0)
    assert gaps.rate(tools, 0.1) > 10 * gaps.rate(people, 0.1)
    assert gaps.rate(people, 60.0) > 2 * gaps.rate(tools, 60.0)


def test_scopes_beyond_the_bound_are_forgotten_oldest_first() -> None:
    gaps = Gaps()
    for number in range(MAX_SCOPES):
        gaps.returned(Crowd(str(number), Pace.FAST), 1.0, 0.0)
    gaps.silent(Crowd("0", Pace.SLOW), 1.0, 0.0)
    gaps.returned(Crowd("new", Pace.FAST), 1.0, 0.0)
    assert len(gaps) == MAX_SCOPES
    assert "new" in gaps
    assert "0" in gaps
    assert "1" not in gaps


@given(observations, ages, st.floats(0.0, 4_000.0), st.floats(0.0, 4_000.0))
def test_a_chance_is_one_and_grows_with_the_time(
    seen: list[tuple[bool, float]], age_s: float, within_s: float, more_s: float
) -> None:
    gaps = _learnt(seen)
    chance = gaps.chance(FAST, age_s, within_s)
    assert 0.0 <= chance <= gaps.chance(FAST, age_s, within_s + more_s) <= 1.0


@given(observations, st.sampled_from([0.0, 0.001, 0.1, 1.0, 10.0, 100.0]), st.floats(0.001, 4_000.0))
def test_no_time_of_keeping_is_better_than_the_rate(
    seen: list[tuple[bool, float]], decades: float, within_s: float
) -> None:
    # Ages at which bins begin: in between the rate is drawn as a line.
    gaps = _learnt(seen)
    age_s = max(edge for edge in EDGES_S if edge <= decades)
    steps = 400
    width_s = within_s / steps
    alive = [1 - gaps.chance(FAST, age_s, step * width_s) for step in range(steps + 1)]
    watched_s = sum(alive) * width_s
    assert gaps.chance(FAST, age_s, within_s) / watched_s <= gaps.rate(FAST, age_s) * (1 + 1e-6)


@given(observations, ages)
def test_a_return_never_makes_returns_less_likely_than_silence_until_then_does(
    seen: list[tuple[bool, float]], age_s: float
) -> None:
    back, away = _learnt([*seen, (True, age_s)]), _learnt([*seen, (False, age_s)])
    for within_s in (1.0, 60.0, 3_600.0):
        assert back.chance(FAST, 0.0, within_s) >= away.chance(FAST, 0.0, within_s) - 1e-9


@given(observations, ages)
def test_one_more_silence_never_raises_any_chance(seen: list[tuple[bool, float]], age_s: float) -> None:
    before, after = _learnt(seen), _learnt([*seen, (False, age_s)])
    for within_s in (1.0, 60.0, 3_600.0):
        assert after.chance(FAST, 0.0, within_s) <= before.chance(FAST, 0.0, within_s) + 1e-9


def test_ten_thousand_questions_cost_little() -> None:
    gaps = _learnt([(True, 1.0)] * 100)
    began = time.process_time()
    for number in range(10_000):
        gaps.rate(FAST, number / 10)
    assert time.process_time() - began < 0.5, "about 10 ms on an idle machine"
