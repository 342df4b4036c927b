"""What the guardian kills when its launcher is gone."""

import pytest

from backhaul_local.guardian import follow


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        pytest.param([], set(), id="nothing was started"),
        pytest.param(["+7\n"], {7}, id="one runs"),
        pytest.param(["+7\n", "-7\n"], set(), id="one was ended"),
        pytest.param(["-7\n", "+8\n"], {8}, id="one ended before it could report"),
        pytest.param(["+7\n", "+8\n", "-7\n", "+9\n"], {8, 9}, id="two of three run"),
    ],
)
def test_groups_under_guard_are_those_that_were_not_taken_out(lines: list[str], left: set[int]) -> None:
    assert follow(lines) == left
