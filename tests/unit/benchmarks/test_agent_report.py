"""What the agent's benchmark compares, and what it finds to be wrong."""

from typing import Any

import pytest

from benchmarks.agent.__main__ import arms, problems
from benchmarks.agent.run import Arm


def report(**changes: Any) -> dict[str, Any]:
    arm = {"arm": {"set_count": 100}, "cpu_share": [0.02, 0.03], "set_count": [100, 98], "lost": 0, **changes}
    return {"machine_cpu_share": [0.8, 0.8], "own_cpu_share": [0.7, 0.7], "arms": {"100": arm}}


def test_the_greatest_number_of_sets_is_tried_with_a_full_budget_and_over_nixl_too() -> None:
    made = arms([1_000, 10], 20.0, nixl=True)

    assert [arm.name for arm in made] == ["idle", "1,000", "10", "1,000, full", "1,000, NIXL"]
    assert [arm.set_count for arm in made] == [0, 1_000, 10, 1_000, 1_000]
    assert [arm.name for arm in arms([10], 20.0, nixl=False)] == ["idle", "10", "10, full"]


def test_only_where_turns_end_are_all_blocks_of_the_budget_needed() -> None:
    full = Arm(name="full", set_count=10_000, turns_per_s=20.0)
    ample = Arm(name="ample", set_count=10_000)

    assert full.block_count // 2 == 4 * 10_000
    assert ample.block_count // 2 > 4 * 10_000


def test_a_run_that_says_something_has_no_problems() -> None:
    assert problems(report()) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"cpu_share": [0.04, 0.08]}, "100: 6.0% of a core, more than 5%"),
        ({"set_count": [100, 90]}, "100: only 90 of 100 sets were held"),
        ({"lost": 3}, "100: 3 notifications did not leave"),
    ],
)
def test_what_is_wrong_is_told(changes: dict[str, Any], found: str) -> None:
    assert problems(report(**changes)) == [found]


def test_a_machine_that_was_busy_with_other_things_is_told() -> None:
    assert problems({**report(), "machine_cpu_share": [0.8, 0.95]}) == ["others used 25% of the cores"]
