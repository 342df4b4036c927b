"""How many blocks sets may pin."""

import pytest

from backhaul_node_agent.core.retention.budget import Memory, limit


@pytest.mark.parametrize(
    ("free", "waiting", "pinned", "expected"),
    [
        pytest.param(1000, 0, 0, 500, id="an idle engine's share"),
        pytest.param(500, 0, 500, 500, id="what is pinned does not count against itself"),
        pytest.param(300, 0, 300, 500, id="running requests that leave room cost nothing"),
        pytest.param(100, 0, 300, 300, id="running requests fill it to the mark"),
        pytest.param(0, 0, 300, 200, id="a tenth stays free"),
        pytest.param(100, 150, 300, 150, id="what waits counts like what runs"),
        pytest.param(0, 0, 0, 0, id="an engine that is full with requests"),
        pytest.param(0, 5000, 300, 0, id="more waits than there is"),
    ],
)
def test_running_waiting_and_retained_blocks_stay_below_the_mark(
    free: int, waiting: int, pinned: int, expected: int
) -> None:
    assert limit(Memory(1000, free, waiting), pinned, share=0.5, mark=0.9) == expected


def test_figures_that_contradict_each_other_do_no_harm() -> None:
    assert limit(Memory(1000, 900, 0), 400, share=0.5, mark=0.9) == 500
