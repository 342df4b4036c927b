"""What counts as progress of an engine, and when it is stuck."""

import time

import pytest

from backhaul_node_agent.core.bounds import MAX_COUNT
from backhaul_node_agent.core.progress import Figures, Progress, read_figures, request_count

BUSY = Figures(waiting=3, running=1, used=0.5, token_count=100)


def problems(*steps: tuple[float, Figures]) -> list[bool]:
    """Tells, for each step, whether the engine of rank 0 is stuck; it may stand still for 10 s."""
    progress = Progress(10)
    return [bool(progress.problem({0: figures}, at)) for at, figures in steps]


def test_an_engine_is_stuck_after_it_has_stood_still_with_requests() -> None:
    assert problems((0, BUSY), (9, BUSY), (10, BUSY), (20, BUSY)) == [False, False, True, True]


@pytest.mark.parametrize(
    "moved",
    [
        Figures(waiting=3, running=1, used=0.5, token_count=101),
        Figures(waiting=3, running=1, used=0.6, token_count=100),
        Figures(waiting=3, running=2, used=0.5, token_count=100),
        Figures(waiting=2, running=1, used=0.5, token_count=100),
    ],
    ids=["a token", "more of a long prompt", "another request runs", "one waits no longer"],
)
def test_any_change_is_progress(moved: Figures) -> None:
    assert problems((0, BUSY), (9, moved), (18, moved), (19, moved)) == [False, False, False, True]
    assert problems((0, BUSY), (15, BUSY), (16, moved)) == [False, True, False]


def test_requests_that_arrive_are_no_progress() -> None:
    more = [Figures(waiting=number, running=1, used=0.5, token_count=100) for number in range(3, 8)]
    assert problems(*((3.0 * at, figures) for at, figures in enumerate(more))) == [False, False, False, False, True]


def test_an_engine_without_requests_may_stand_still_and_its_time_counts_from_the_first_one() -> None:
    idle = Figures(used=0.5, token_count=100)
    waiting = Figures(waiting=1, used=0.5, token_count=100)
    assert problems((0, idle), (100, idle), (101, waiting), (110, waiting), (111, waiting)) == [
        *(False, False, False, False),
        True,
    ]


def test_one_rank_is_stuck_beside_another_that_works() -> None:
    progress = Progress(10)
    progress.problem({0: BUSY, 1: BUSY}, 0)
    assert "rank 1 " in progress.problem({0: Figures(running=1, token_count=9), 1: BUSY}, 10)
    assert progress.problem({}, 20) == ""


def test_figures_are_read_by_rank_and_summed_over_models() -> None:
    exposition = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 1e+06
vllm:generation_tokens_total{engine="0",model_name="m"} 5.0
vllm:generation_tokens_total{engine="0",model_name="adapter"} 7.0
"""
    assert read_figures(exposition) == {
        0: Figures(running=2, used=0.25, token_count=1_000_012),
        1: Figures(waiting=4),
    }
    assert read_figures("") == {}


@pytest.mark.parametrize(
    "exposition",
    [
        'vllm:num_requests_running{engine="' + "9" * 5_000 + '"} 1.0',
        'vllm:num_requests_running{engine="0"} ' + "9" * 5_000,
        'vllm:num_requests_running{engine="0"} 1e99999999',
        'vllm:num_requests_running{engine="0"} NaN',
        'vllm:num_requests_running{engine="0"} -1.0',
        "vllm:num_requests_running{" * 150_000,
        'vllm:num_requests_running{engine="0' * 150_000,
    ],
    ids=["rank", "figure", "power", "nan", "negative", "no-end", "no-line"],
)
def test_figures_that_no_engine_shows_are_passed_over_in_good_time(exposition: str) -> None:
    began = time.monotonic()
    assert read_figures(exposition) == {}
    assert time.monotonic() - began < 10


def test_figures_that_know_no_bounds_are_figures() -> None:
    shown = read_figures('vllm:num_requests_running{engine="0"} 1e9999')
    assert Progress(10).problem(shown, 0.0) == Progress(10).problem(shown, 20.0) == ""


def test_requests_that_nobody_could_count_are_as_many_as_can_be_said() -> None:
    endless = read_figures(
        'vllm:num_requests_running{engine="0"} 1e9999\n'
        'vllm:num_requests_waiting{engine="0"} 1e300\n'
        'vllm:kv_cache_usage_perc{engine="0"} 1e9999\n'
    )
    assert endless == {0: Figures(running=MAX_COUNT, waiting=MAX_COUNT, used=1.0)}
    assert request_count(endless) == MAX_COUNT
    assert request_count({}) is None
