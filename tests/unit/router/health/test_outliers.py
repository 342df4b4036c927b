"""What counts against a node beside its peers: over seeded runs of pools."""

import random

import pytest

from backhaul_router.core.engines import Failure
from backhaul_router.core.health.breakers import Breakers, BreakerSettings, BreakerState
from backhaul_router.core.nodes import Node
from tests.unit.router.health.pool import Now, Pool, always, between
from tests.unit.router.test_nodes import node

SETTINGS = BreakerSettings()
SINCE, UNTIL = 5.0, 25.0
"""While a node of the runs below is faulty, seconds."""


def pool_of(*node_ids: str) -> list[Node]:
    return [node(node_id) for node_id in node_ids]


def faults_among(breakers: Breakers, faulty: Node, answers: int, faults: int = SETTINGS.faults) -> None:
    """The node fails now and then, never twice in a row."""
    for _ in range(faults):
        for _ in range(answers // faults - 1):
            breakers.answered(faulty)
        breakers.failed(faulty, Failure.FAULT)


def breakers_with(peers: list[Node], *, answers: int, faults: int = 0) -> Breakers:
    """Peers that have answered so often, and failed so often among it."""
    breakers = Breakers(Now(), random.Random(1), SETTINGS)
    for peer in peers:
        for number in range(answers):
            if number < 2 * faults and number % 2:
                breakers.failed(peer, Failure.FAULT)
            else:
                breakers.answered(peer)
    return breakers


# What is an outlier


def test_a_node_with_a_share_of_faults_beyond_its_peers_is_ejected_and_no_answer_refutes_that() -> None:
    breakers = breakers_with(pool_of("d2", "d3"), answers=150)
    faults_among(breakers, node("d1"), 150)
    breakers.answered(node("d1"))
    assert breakers.state(node("d1")) is BreakerState.OPEN


@pytest.mark.parametrize(
    ("peers", "answers", "faults"),
    [
        (["d2", "d3"], 150, 2),
        (["d2", "d3"], 30, 0),
        (["d2"], 150, 1),
        (["p1", "p2"], 150, 0),
        ([], 0, 0),
    ],
    ids=["fail alike", "few answers", "a fault of the only other", "of another role", "none"],
)
def test_without_peers_that_show_better_it_is_none(peers: list[str], answers: int, faults: int) -> None:
    breakers = breakers_with(pool_of(*peers), answers=answers, faults=faults)
    faults_among(breakers, node("d1"), 150)
    assert breakers.state(node("d1")) is BreakerState.CLOSED


def test_a_node_of_another_model_is_no_peer() -> None:
    breakers = breakers_with([node("d2", models=frozenset({"other"}))], answers=150)
    assert not any(breakers.avoided(each) for each in pool_of("d1", "d3"))
    faults_among(breakers, node("d1"), 150)
    assert breakers.state(node("d1")) is BreakerState.CLOSED


def test_less_than_one_in_a_hundred_is_well_enough() -> None:
    breakers = breakers_with(pool_of("d2", "d3"), answers=5_000)
    faults_among(breakers, node("d1"), 600, faults=6)
    assert breakers.state(node("d1")) is BreakerState.OPEN
    faults_among(breakers, node("d2"), 1_200, faults=6)
    assert breakers.state(node("d2")) is BreakerState.CLOSED


def test_faults_that_are_far_apart_are_strays_however_few_answers_are_between_them() -> None:
    now = Now()
    breakers = Breakers(now, random.Random(1), SETTINGS)
    for _ in range(5):
        for peer in pool_of("d2", "d3"):
            for _ in range(20):
                breakers.answered(peer)
        faults_among(breakers, node("d1"), 5, faults=1)
        assert breakers.state(node("d1")) is BreakerState.CLOSED
        now.value += 0.6 * SETTINGS.window_s


def test_what_was_well_before_does_not_hide_what_fails_now() -> None:
    breakers = breakers_with(pool_of("d1", "d2", "d3"), answers=5_000)
    faults_among(breakers, node("d1"), 150)
    assert breakers.state(node("d1")) is BreakerState.OPEN


def test_an_ejected_peer_does_not_hide_another() -> None:
    breakers = breakers_with(pool_of("d3", "d4"), answers=150)
    for node_id in ("d1", "d2"):
        faults_among(breakers, node(node_id), 150)
        assert breakers.state(node(node_id)) is BreakerState.OPEN


@pytest.mark.parametrize(("size", "most"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 4)])
def test_at_most_half_of_a_pool_is_ejected_for_its_share_of_faults(size: int, most: int) -> None:
    nodes = pool_of(*(f"d{number}" for number in range(size)))
    breakers = breakers_with(nodes, answers=500)
    for faulty in nodes:
        faults_among(breakers, faulty, 150)
    assert [breakers.avoided(each) for each in nodes] == most * [True] + (size - most) * [False]


def test_the_half_is_that_of_each_model() -> None:
    """Else the only two nodes of a model could go because others serve another one beside it."""
    one, two = node("d1", models=frozenset({"m", "a"})), node("d2", models=frozenset({"m", "a"}))
    breakers = breakers_with([one, two, *pool_of("d3", "d4", "d5")], answers=500)
    for faulty in (one, two):
        faults_among(breakers, faulty, 150)
    assert (breakers.avoided(one), breakers.avoided(two)) == (True, False)


def test_the_only_node_of_a_model_is_not_ejected_for_its_share_of_faults() -> None:
    only = node("d1", models=frozenset({"m", "a"}))
    breakers = breakers_with(pool_of("d2", "d3"), answers=500)
    faults_among(breakers, only, 150)
    assert not breakers.avoided(only)


def test_nodes_that_refuse_are_avoided_however_many_they_are() -> None:
    nodes = pool_of("d1", "d2", "d3")
    breakers = breakers_with(nodes, answers=10)
    for each in nodes:
        breakers.failed(each, Failure.REFUSED)
    assert all(breakers.avoided(each) for each in nodes)


# Coming back


def _ejected_and_back(breakers: Breakers, now: Now) -> None:
    faults_among(breakers, node("d1"), 150)
    now.value += SETTINGS.ejection_s
    breakers.picked(node("d1"))
    breakers.answered(node("d1"))
    assert breakers.state(node("d1")) is BreakerState.STARTING


def test_a_node_that_goes_on_failing_after_its_probe_is_ejected_again_for_twice_the_time() -> None:
    now = Now()
    breakers = Breakers(now, random.Random(1), SETTINGS)
    for _ in range(500):
        breakers.answered(node("d2"))
    _ejected_and_back(breakers, now)
    faults_among(breakers, node("d1"), 100, faults=1)
    assert breakers.state(node("d1")) is BreakerState.STARTING, "what was before the probe must not count"
    faults_among(breakers, node("d1"), 100, faults=1)
    now.value += 2 * SETTINGS.ejection_s - 0.1
    assert breakers.state(node("d1")) is BreakerState.OPEN
    now.value += 0.1
    assert breakers.state(node("d1")) is BreakerState.HALF_OPEN


# Runs


@pytest.mark.parametrize("seed", range(5))
def test_stray_faults_at_low_traffic_eject_no_healthy_node(seed: int) -> None:
    pool = Pool(pool_of("d1", "d2"), rate=6.0, faulty={"d1": always(0.005), "d2": always(0.005)}, seed=seed)
    run = pool.until(300.0)
    assert run.faults
    assert run.ejections == []


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_pool_that_fails_alike_goes_on_with_nearly_all_of_its_nodes(size: int) -> None:
    nodes = pool_of(*(f"d{number}" for number in range(size)))
    pool = Pool(nodes, rate=50.0 * size, faulty={each.node_id: always(0.02) for each in nodes}, seed=3)
    run = pool.until(60.0)
    assert len(run.ejections) <= 6
    least = min(run.share(each.node_id, 0.0, 60.0) for each in nodes)
    assert least > 0.7 / size


def _partly_faulty(seed: int) -> Pool:
    """Three nodes with 150 legs a second each; one fails 2 % of them for a while."""
    faulty = {"d1": between(SINCE, UNTIL, 0.02)}
    return Pool(pool_of("d1", "d2", "d3"), rate=450.0, faulty=faulty, seed=seed)


def test_nothing_is_sent_to_a_node_two_seconds_after_it_began_to_fail_some_requests() -> None:
    runs = [_partly_faulty(seed).until(SINCE + 4.0) for seed in range(20)]
    begun = [run.faults[0].sent for run in runs]
    shares = [run.share("d1", first + 1.5, first + 2.0) for run, first in zip(runs, begun, strict=True)]
    assert sum(share < 0.05 for share in shares) >= 18
    assert all({node_id for _, node_id in run.ejections} == {"d1"} for run in runs)


@pytest.mark.parametrize("seed", range(6))
def test_it_gets_little_while_it_goes_on_failing_and_its_share_when_it_is_well_again(seed: int) -> None:
    pool = _partly_faulty(seed)
    run = pool.until(UNTIL + 0.1)
    last, _ = run.ejections[-1]
    ejection_s = SETTINGS.ejection_s * 2.0 ** (len(run.ejections) - 1)
    back_by = max(UNTIL, last + ejection_s) + SETTINGS.slow_start_s + 2.0
    pool.until(back_by + 2.0)
    assert run.share("d1", SINCE + 2.0, UNTIL) < 0.12
    assert run.share("d1", back_by, back_by + 2.0) >= 0.25
