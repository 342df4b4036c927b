"""Which retained sets are worth their blocks."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from backhaul_node_agent.core.retention.gaps import Crowd, Gaps, Pace
from backhaul_node_agent.core.retention.policy import Benefit, Kept, Lru

FAST, SLOW = Crowd("scope", Pace.FAST), Crowd("scope", Pace.SLOW)


def _kept(*, crowd: Crowd = FAST, tokens: int = 1_000, blocks: int = 10, age_s: float = 1.0) -> Kept:
    return Kept("set", crowd, token_count=tokens, block_count=blocks, age_s=age_s)


def test_lru_keeps_the_youngest_longest() -> None:
    lru = Lru()
    assert lru.worth(_kept(age_s=1.0)) > lru.worth(_kept(age_s=2.0, tokens=10**6))


def test_what_saves_more_tokens_is_worth_more() -> None:
    benefit = Benefit(Gaps())
    assert benefit.worth(_kept(tokens=2_000)) > benefit.worth(_kept(tokens=1_000))


def test_what_frees_more_blocks_is_worth_less() -> None:
    benefit = Benefit(Gaps())
    assert benefit.worth(_kept(blocks=20)) < benefit.worth(_kept(blocks=10))


def test_a_set_that_shares_its_blocks_is_worth_more_than_one_that_has_its_own() -> None:
    benefit = Benefit(Gaps())
    assert benefit.worth(_kept(tokens=8_000, blocks=2)) > benefit.worth(_kept(tokens=8_000, blocks=250))


def test_a_tool_that_is_overdue_gives_way_to_a_person_who_is_not() -> None:
    gaps = Gaps()
    for _ in range(300):
        gaps.returned(FAST, 1.0, 0.0)
        gaps.returned(SLOW, 120.0, 0.0)
    benefit = Benefit(gaps)
    assert benefit.worth(_kept(crowd=FAST, age_s=0.5)) > benefit.worth(_kept(crowd=SLOW, age_s=60.0))
    assert benefit.worth(_kept(crowd=FAST, age_s=60.0)) < benefit.worth(_kept(crowd=SLOW, age_s=61.0))


@given(st.sampled_from(Pace), st.integers(1, 10**6), st.integers(1, 10**4), st.floats(0.0, 1e5))
def test_worth_is_never_negative(pace: Pace, tokens: int, blocks: int, age_s: float) -> None:
    assert Benefit(Gaps()).worth(_kept(crowd=Crowd("scope", pace), tokens=tokens, blocks=blocks, age_s=age_s)) >= 0.0


@given(st.integers(1, 10**4), st.integers(2, 10), st.floats(0.0, 1e4))
def test_sets_that_are_alike_but_for_their_length_are_worth_the_same(blocks: int, times: int, age_s: float) -> None:
    benefit = Benefit(Gaps())
    short = _kept(tokens=blocks * 16, blocks=blocks, age_s=age_s)
    long = dataclasses.replace(short, token_count=short.token_count * times, block_count=blocks * times)
    assert abs(benefit.worth(long) - benefit.worth(short)) <= 1e-9 * benefit.worth(short)
