"""What counts against a node, and against a pair."""

import pytest

from backhaul_router.core.engines import Failure
from backhaul_router.core.standing import APART_S, AVOIDED_S, FAULTS_IN_A_ROW, MAX_APART_S, Standing
from tests.unit.router.test_nodes import node
from tests.unit.router.test_picking import Now

P, D = node("p1"), node("d1")


@pytest.mark.parametrize(
    "failure", [Failure.REFUSED, Failure.DISCONNECTED, Failure.TIMEOUT, Failure.UNAVAILABLE, Failure.GONE]
)
def test_what_no_request_can_bring_about_counts_at_once(failure: Failure) -> None:
    now = Now()
    standing = Standing(now)
    standing.failed(D, failure)
    assert standing.avoided(D)
    now.value = AVOIDED_S
    assert not standing.avoided(D)


@pytest.mark.parametrize("failure", [Failure.FAULT, Failure.ABANDONED])
def test_faults_count_only_when_several_come_in_a_row(failure: Failure) -> None:
    standing = Standing(Now())
    for _ in range(3):
        for _ in range(FAULTS_IN_A_ROW - 1):
            standing.failed(D, failure)
        assert not standing.avoided(D)
        standing.answered(D)
    for _ in range(FAULTS_IN_A_ROW):
        standing.failed(D, failure)
    assert standing.avoided(D)


def test_a_node_whose_probe_fails_is_avoided_again() -> None:
    now = Now()
    standing = Standing(now)
    standing.failed(D, Failure.REFUSED)
    now.value = AVOIDED_S
    standing.picked(D)
    assert standing.avoided(D)
    standing.failed(D, Failure.REFUSED)
    now.value += AVOIDED_S - 0.1
    assert standing.avoided(D)


def test_a_node_that_never_failed_is_not_avoided_for_being_picked() -> None:
    standing = Standing(Now())
    standing.picked(D)
    assert not standing.avoided(D)


def test_a_pair_is_apart_in_both_directions_for_a_while() -> None:
    now = Now()
    standing = Standing(now)
    assert standing.read_failed(P, D) == APART_S
    assert standing.apart(P, D)
    assert standing.apart(D, P)
    assert not standing.apart(P, node("d2"))
    now.value = APART_S
    assert not standing.apart(P, D)


def test_each_further_failure_doubles_the_time_up_to_a_limit() -> None:
    standing = Standing(Now())
    assert [standing.read_failed(P, D) for _ in range(6)] == [5.0, 10.0, 20.0, 40.0, MAX_APART_S, MAX_APART_S]
    standing.read_worked(P, D)
    assert not standing.apart(P, D)
    assert standing.read_failed(P, D) == APART_S


def test_a_pair_may_fail_without_end() -> None:
    standing = Standing(Now())
    assert {standing.read_failed(P, D) for _ in range(2_000)} == {5.0, 10.0, 20.0, 40.0, MAX_APART_S}


def test_a_read_the_other_way_proves_nothing() -> None:
    standing = Standing(Now())
    standing.read_failed(P, D)
    standing.read_worked(D, P)
    assert standing.apart(P, D)


def test_what_failed_long_ago_does_not_double_the_time() -> None:
    now = Now()
    standing = Standing(now)
    standing.read_failed(P, D)
    now.value = APART_S + MAX_APART_S
    assert standing.read_failed(P, D) == APART_S


def test_nodes_that_are_gone_are_forgotten() -> None:
    standing = Standing(Now())
    standing.failed(P, Failure.REFUSED)
    standing.failed(D, Failure.REFUSED)
    standing.read_failed(P, D)
    standing.forget({"p1"})
    assert (standing.avoided(P), standing.avoided(D), standing.apart(P, D)) == (True, False, False)
