"""Seconds survive the way through a message."""

import pytest

from backhaul_common.durations import MAX_S, duration, seconds


@pytest.mark.parametrize("value", [0.0, 0.25, 1.5, 3600.0])
def test_seconds_come_back(value: float) -> None:
    assert seconds(duration(value)) == value


@pytest.mark.parametrize(("value", "nanos"), [(-1.0, 0), (1.9999999999, 1_999_999_999)])
def test_a_duration_is_never_negative_nor_rounded_up(value: float, nanos: int) -> None:
    assert duration(value).ToNanoseconds() == nanos


@pytest.mark.parametrize(
    ("value", "shown"), [(1e300, MAX_S), (float("inf"), MAX_S), (float("nan"), 0.0), (1e12, MAX_S)]
)
def test_a_time_that_no_duration_can_say_is_as_near_as_one_can(value: float, shown: float) -> None:
    assert seconds(duration(value)) == shown
