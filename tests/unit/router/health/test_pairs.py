"""What counts against a pair."""

from backhaul_router.core.health.pairs import APART_S, MAX_APART_S, Pairs
from tests.unit.router.health.pool import Now
from tests.unit.router.test_nodes import node

P, D = node("p1"), node("d1")


def test_a_pair_is_apart_in_both_directions_for_a_while() -> None:
    now = Now()
    pairs = Pairs(now)
    assert pairs.read_failed(P, D) == APART_S
    assert pairs.apart(P, D)
    assert pairs.apart(D, P)
    assert not pairs.apart(P, node("d2"))
    now.value = APART_S
    assert not pairs.apart(P, D)


def failing_again_and_again(pairs: Pairs, now: Now, times: int) -> list[float]:
    """Returns for how long a pair is set apart that fails whenever it is tried again."""
    apart = []
    for _ in range(times):
        apart.append(pairs.read_failed(P, D))
        now.value += apart[-1]
    return apart


def test_each_further_failure_doubles_the_time_up_to_a_limit() -> None:
    now = Now()
    pairs = Pairs(now)
    assert failing_again_and_again(pairs, now, 6) == [5.0, 10.0, 20.0, 40.0, MAX_APART_S, MAX_APART_S]
    pairs.read_worked(P, D)
    assert not pairs.apart(P, D)
    assert pairs.read_failed(P, D) == APART_S


def test_turns_that_fail_together_count_once() -> None:
    now = Now()
    pairs = Pairs(now)
    assert [pairs.read_failed(P, D) for _ in range(6)] == [APART_S, 0.0, 0.0, 0.0, 0.0, 0.0]
    now.value = APART_S
    assert not pairs.apart(P, D)


def test_a_pair_may_fail_without_end() -> None:
    now = Now()
    pairs = Pairs(now)
    assert {*failing_again_and_again(pairs, now, 2_000)} == {5.0, 10.0, 20.0, 40.0, MAX_APART_S}


def test_a_read_the_other_way_proves_nothing() -> None:
    pairs = Pairs(Now())
    pairs.read_failed(P, D)
    pairs.read_worked(D, P)
    assert pairs.apart(P, D)


def test_what_failed_long_ago_does_not_double_the_time() -> None:
    now = Now()
    pairs = Pairs(now)
    pairs.read_failed(P, D)
    now.value = APART_S + MAX_APART_S - 0.1
    assert pairs.read_failed(P, D) == 2 * APART_S
    now.value += 2 * APART_S + MAX_APART_S
    assert pairs.read_failed(P, D) == APART_S


def test_pairs_of_nodes_that_are_gone_are_forgotten() -> None:
    pairs = Pairs(Now())
    pairs.read_failed(P, D)
    pairs.read_failed(P, node("d2"))
    pairs.forget({"p1", "d2"})
    assert (pairs.apart(P, D), pairs.apart(P, node("d2"))) == (False, True)
