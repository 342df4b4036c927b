"""The most that could have been saved."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul_replay.bound import most_tokens
from backhaul_replay.replay import Interval

intervals = st.builds(
    lambda begin, length, blocks, tokens: Interval(begin, begin + length, blocks, tokens),
    st.integers(0, 20),
    st.integers(1, 10),
    st.integers(1, 5),
    st.integers(1, 1_000),
)


def test_without_returns_nothing_is_saved() -> None:
    assert most_tokens([], 10) == 0.0


def test_all_is_saved_where_all_fits() -> None:
    held = [Interval(0, 10, 5, 100), Interval(5, 15, 5, 200), Interval(10, 20, 5, 400)]
    assert most_tokens(held, 10) == pytest.approx(700)


def test_of_two_that_do_not_fit_together_the_better_one_counts_whole_and_the_other_in_part() -> None:
    held = [Interval(0, 10, 6, 60), Interval(5, 15, 6, 600)]
    assert most_tokens(held, 6) == pytest.approx(600)
    assert most_tokens(held, 9) == pytest.approx(630)


def test_one_that_ends_when_the_next_begins_makes_room_for_it() -> None:
    assert most_tokens([Interval(0, 10, 6, 60), Interval(10, 20, 6, 60)], 6) == pytest.approx(120)


def test_what_never_fits_does_not_count_in_part() -> None:
    assert most_tokens([Interval(0, 10, 11, 1_000)], 10) == 0.0


@settings(max_examples=40)
@given(st.lists(intervals, max_size=6), st.integers(1, 10))
def test_no_choice_saves_more(held: list[Interval], block_count: int) -> None:
    def fits(chosen: tuple[Interval, ...]) -> bool:
        return all(
            sum(other.block_count for other in chosen if other.begin_s <= one.begin_s < other.end_s) <= block_count
            for one in chosen
        )

    choices = (chosen for size in range(len(held) + 1) for chosen in combinations(held, size) if fits(chosen))
    best = max(sum(interval.token_count for interval in chosen) for chosen in choices)
    assert most_tokens(held, block_count) >= best - 1e-6
