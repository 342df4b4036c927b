"""Bounds of an engine's clock."""

import random

import pytest

from backhaul_node_agent.core.engine_clock import DRIFT, SAMPLES_TO_TRUST, EngineClock


def test_a_clock_without_samples_is_not_trusted() -> None:
    assert not EngineClock().trusted


def test_one_sample_bounds_the_clock_by_its_round_trip() -> None:
    clock = EngineClock().observe(sent=10.0, engine_now=510.0, received=10.2)
    assert clock.trusted
    assert clock.earliest(10.2) == pytest.approx(510.0, abs=0.001)
    assert clock.latest(10.2) == pytest.approx(510.2, abs=0.001)


def test_a_fast_answer_narrows_what_a_slow_one_left_open() -> None:
    clock = EngineClock().observe(sent=10.0, engine_now=510.5, received=11.0)
    clock = clock.observe(sent=11.0, engine_now=511.0005, received=11.001)
    assert clock.latest(11.001) - clock.earliest(11.001) < 0.01


def test_bounds_widen_with_time_by_the_drift() -> None:
    clock = EngineClock().observe(sent=10.0, engine_now=510.0, received=10.0)
    assert clock.latest(1010.0) - clock.earliest(1010.0) == pytest.approx(2 * DRIFT * 1000)


@pytest.mark.parametrize("rate", [1 - 0.9 * DRIFT, 1.0, 1 + 0.9 * DRIFT], ids=["slow", "equal", "fast"])
def test_the_true_reading_is_always_within_the_bounds(rate: float) -> None:
    rng = random.Random(7)
    clock, now = EngineClock(), 100.0
    for _ in range(2_000):
        sent = now
        out, back = rng.expovariate(1000), rng.expovariate(200)
        clock = clock.observe(sent=sent, engine_now=7.0 + (sent + out) * rate, received=sent + out + back)
        now = sent + out + back
        assert clock.earliest(now) <= 7.0 + now * rate <= clock.latest(now)
        now += 1.0
    assert clock.jump_count == 0


@pytest.mark.parametrize("jump_s", [-3.0, 3.0], ids=["back", "ahead"])
def test_a_jump_ends_trust_until_several_samples_agree(jump_s: float) -> None:
    clock = EngineClock().observe(sent=10.0, engine_now=510.0, received=10.001)
    clock = clock.observe(sent=11.0, engine_now=511.0 + jump_s, received=11.001)
    assert clock.jump_count == 1
    assert not clock.trusted
    for second in range(SAMPLES_TO_TRUST - 1):
        sent = 12.0 + second
        clock = clock.observe(sent=sent, engine_now=sent + 500.0 + jump_s, received=sent + 0.001)
    assert clock.trusted
    assert clock.earliest(20.0) == pytest.approx(520.0 + jump_s, abs=0.02)
