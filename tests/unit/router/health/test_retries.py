"""How much may be repeated."""

from backhaul_router.core.health.retries import SPARE, WINDOW_S, RetryBudget
from tests.unit.router.health.pool import Now


def _allowed(budget: RetryBudget, tries: int) -> int:
    return sum(budget.allowed() for _ in range(tries))


def test_a_router_with_few_turns_may_repeat_some() -> None:
    assert _allowed(RetryBudget(Now()), 10) == SPARE == 3


def test_a_fifth_of_the_turns_may_be_repeated_and_a_few() -> None:
    budget = RetryBudget(Now())
    for _ in range(100):
        budget.began()
    assert _allowed(budget, 100) == 23


def test_what_was_refused_is_not_counted_and_what_was_repeated_long_ago_no_more() -> None:
    now = Now()
    budget = RetryBudget(now)
    assert _allowed(budget, 1_000) == SPARE
    now.value = WINDOW_S / 2
    assert not budget.allowed()
    now.value = WINDOW_S + 0.6
    assert _allowed(budget, 1_000) == SPARE


def test_turns_of_long_ago_allow_nothing() -> None:
    now = Now()
    budget = RetryBudget(now)
    for _ in range(100):
        budget.began()
    now.value = WINDOW_S + 0.6
    assert _allowed(budget, 100) == SPARE


def test_a_pool_that_fails_every_leg_gets_a_fifth_more_and_no_storm() -> None:
    now = Now()
    budget = RetryBudget(now)
    turns = repeated = 0
    for step in range(6_000):
        now.value = step * 0.01
        budget.began()
        turns += 1
        repeated += budget.allowed()
    assert 0.18 * turns <= repeated <= 0.22 * turns
