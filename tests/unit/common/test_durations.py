"""Seconds survive the way through a message."""

import pytest

from backhaul_common.durations import duration, seconds


@pytest.mark.parametrize("value", [0.0, 0.25, 1.5, 3600.0])
def test_seconds_come_back(value: float) -> None:
    assert seconds(duration(value)) == value


@pytest.mark.parametrize(("value", "nanos"), [(-1.0, 0), (1.9999999999, 1_999_999_999)])
def test_a_duration_is_never_negative_nor_rounded_up(value: float, nanos: int) -> None:
    assert duration(value).ToNanoseconds() == nanos
