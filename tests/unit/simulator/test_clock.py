"""The simulator's own clock."""

from backhaul_simulator.clock import skewed


def test_a_clock_is_ahead_by_its_offset_and_runs_at_its_own_rate() -> None:
    now = 100.0
    read = skewed(lambda: now, offset_s=3600.0, rate_ppm=200.0)
    assert read() == 3700.0
    now = 1_100.0
    assert read() == 4700.2
