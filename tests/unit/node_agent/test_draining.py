"""When a drained node leaves, and what it says until then."""

import pytest

from backhaul_node_agent.core.draining import SETTLE_S, Draining, Load, Phase
from backhaul_node_agent.core.progress import Figures, request_count

SETTLED = 100.0 + SETTLE_S
"""When figures begin to count after an operator has asked at 100."""


def drained(within_s: float = 60.0, *, retiring: bool = True) -> Draining:
    """Returns a drain that was asked for at 100."""
    draining = Draining()
    draining.ask(100.0, within_s, retiring=retiring)
    return draining


@pytest.mark.parametrize(
    ("requests", "sets", "leaves"),
    [(0, 0, True), (1, 0, False), (0, 1, False), (None, 0, False)],
    ids=["nothing left", "a request runs", "a set is held", "the engine does not say"],
)
@pytest.mark.parametrize("retiring", [True, False], ids=["retiring", "agent ends"])
def test_a_node_leaves_when_nothing_runs_and_nothing_is_held_and_at_its_deadline_in_any_case(
    requests: int | None, sets: int, leaves: bool, retiring: bool
) -> None:
    draining = drained(retiring=retiring)
    assert draining.due(Load(requests, SETTLED), sets, 159.9) is leaves
    assert draining.due(Load(requests, SETTLED), sets, 160.0)


def test_a_node_that_nobody_drains_stays() -> None:
    assert not Draining().due(Load(0, 1e9), 0, 1e9)
    assert Draining().reason(Load(0, 0.0), 0, 0.0) == ""


def test_engines_of_a_node_that_retires_must_be_seen_idle_after_routers_have_heard_of_it() -> None:
    assert not drained().due(Load(0, SETTLED - 0.1), 0, SETTLED + 1)
    assert drained().due(Load(0, SETTLED), 0, SETTLED + 1)
    # Where only the agent ends, the engine goes on with whatever comes.
    assert drained(retiring=False).due(Load(0, 99.0), 0, 100.0)


def test_asking_again_brings_the_end_forward_and_never_puts_it_off() -> None:
    draining = drained(60.0)
    draining.ask(110.0, 600.0, retiring=True)
    assert draining.remaining_s(110.0) == 50.0
    draining.ask(120.0, 5.0, retiring=True)
    assert draining.remaining_s(120.0) == 5.0
    assert draining.due(Load(0, SETTLED), 0, 121.0)


def test_an_agent_that_ends_while_its_node_retires_leaves_it_retiring() -> None:
    draining = drained()
    draining.ask(110.0, 10.0, retiring=False)
    assert draining.retiring
    assert draining.remaining_s(110.0) == 10.0


def test_a_node_that_has_left_stays_away() -> None:
    draining = drained()
    draining.leave()
    draining.ask(200.0, 60.0, retiring=True)
    assert draining.phase is Phase.LEFT
    assert draining.remaining_s(200.0) == 0.0
    assert not draining.due(Load(0, 300.0), 0, 300.0)
    assert draining.reason(Load(), 0, 300.0) == "drained: the node has left the directory"


@pytest.mark.parametrize(
    ("requests", "sets", "reason"),
    [
        (3, 5, "draining: 3 requests run, 5 block sets are held, leaves in 41 s at the latest"),
        (1, 1, "draining: 1 request runs, 1 block set is held, leaves in 41 s at the latest"),
        (None, 0, "draining: the engine does not say what runs, 0 block sets are held, leaves in 41 s"),
    ],
)
def test_it_says_how_far_it_is(requests: int | None, sets: int, reason: str) -> None:
    assert drained().reason(Load(requests, 100.0), sets, 119.5) == reason


def test_requests_that_run_and_wait_count_on_all_engines() -> None:
    assert request_count({0: Figures(waiting=2, running=1), 1: Figures(running=4)}) == 7
    assert request_count({0: Figures()}) == 0
    assert request_count({}) is None
