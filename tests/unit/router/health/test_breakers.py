"""What counts against a node by itself, how long, and how it comes back."""

import random
from typing import Any

import pytest

from backhaul_router.core.engines import Failure
from backhaul_router.core.health.breakers import Breakers, BreakerSettings, BreakerState
from tests.unit.router.health.pool import Now
from tests.unit.router.test_nodes import node

P, D = node("p1"), node("d1")
SETTINGS = BreakerSettings()
EJECTION_S, SLOW_START_S, FAULTS = SETTINGS.ejection_s, SETTINGS.slow_start_s, SETTINGS.faults
AT_ONCE = [Failure.REFUSED, Failure.DISCONNECTED, Failure.TIMEOUT, Failure.UNAVAILABLE, Failure.GONE]


def breakers_at(now: Now, **settings: Any) -> Breakers:
    return Breakers(now, random.Random(7), BreakerSettings(**settings))


def share_of(breakers: Breakers, node_id: str = "d1") -> float:
    """How much of what it would get goes to the node."""
    return sum(not breakers.avoided(node(node_id)) for _ in range(2_000)) / 2_000


def heal(breakers: Breakers, now: Now, ejection_s: float = EJECTION_S) -> None:
    """Waits for the end of the ejection, and has the probe answered."""
    now.value += ejection_s
    breakers.picked(D)
    breakers.answered(D)


# What opens


@pytest.mark.parametrize("failure", AT_ONCE)
def test_what_no_request_can_bring_about_counts_at_once(failure: Failure) -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.failed(D, failure)
    assert breakers.avoided(D)
    assert breakers.state(D) is BreakerState.OPEN
    now.value = EJECTION_S
    assert not breakers.avoided(D)
    assert breakers.state(D) is BreakerState.HALF_OPEN


@pytest.mark.parametrize("failure", [Failure.FAULT, Failure.ABANDONED])
def test_faults_count_only_when_several_come_in_a_row(failure: Failure) -> None:
    breakers = breakers_at(Now())
    for _ in range(3):
        for _ in range(FAULTS - 1):
            breakers.failed(D, failure)
        assert not breakers.avoided(D)
        breakers.answered(D)
    for _ in range(FAULTS):
        breakers.failed(D, failure)
    assert breakers.avoided(D)


def test_what_fails_by_another_node_counts_for_nothing() -> None:
    breakers = breakers_at(Now())
    for _ in range(10):
        breakers.failed(D, Failure.SOURCE_GONE)
    assert breakers.state(D) is BreakerState.CLOSED


def test_a_node_that_answers_meanwhile_did_not_fail_as_a_whole() -> None:
    now = Now()
    breakers = breakers_at(now)
    for _ in range(5):
        breakers.failed(D, Failure.DISCONNECTED)
        breakers.answered(D)
        assert breakers.state(D) is BreakerState.CLOSED
    breakers.failed(D, Failure.DISCONNECTED)
    now.value = EJECTION_S
    assert breakers.state(D) is BreakerState.HALF_OPEN, "what an answer refuted must not double the time"


# Probes


def test_a_node_whose_probe_fails_is_avoided_again() -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.failed(D, Failure.REFUSED)
    now.value = EJECTION_S
    breakers.picked(D)
    assert breakers.avoided(D)
    breakers.failed(D, Failure.REFUSED)
    now.value += EJECTION_S - 0.1
    assert breakers.avoided(D)


def test_a_node_that_never_failed_is_not_avoided_for_being_picked() -> None:
    breakers = breakers_at(Now())
    breakers.picked(D)
    assert not breakers.avoided(D)


def test_one_request_at_a_time_is_the_probe_and_the_next_one_goes_when_nothing_is_heard_of_it() -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.failed(D, Failure.REFUSED)
    now.value = EJECTION_S
    for _ in range(3):
        assert not breakers.avoided(D)
        breakers.picked(D)
        now.value += EJECTION_S - 0.1
        assert breakers.avoided(D)
        now.value += 0.1


def test_a_request_that_had_to_go_to_an_ejected_node_neither_delays_nor_is_its_probe() -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.failed(D, Failure.REFUSED)
    now.value = EJECTION_S - 0.1
    breakers.picked(D)
    breakers.failed(D, Failure.REFUSED)
    now.value = EJECTION_S
    assert not breakers.avoided(D)


def test_any_fault_of_the_probe_ejects_again() -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.failed(D, Failure.REFUSED)
    now.value = EJECTION_S
    breakers.picked(D)
    breakers.failed(D, Failure.FAULT)
    assert breakers.state(D) is BreakerState.OPEN


def test_each_further_failure_doubles_the_time_up_to_a_limit() -> None:
    now = Now()
    breakers = breakers_at(now)
    for ejection_s in [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] + 1_100 * [60.0]:
        breakers.failed(D, Failure.REFUSED)
        now.value += ejection_s - 0.1
        assert breakers.state(D) is BreakerState.OPEN
        now.value += 0.1
        assert breakers.state(D) is BreakerState.HALF_OPEN
        breakers.picked(D)


def test_a_node_that_fails_soon_after_it_came_back_is_ejected_for_longer_and_one_that_was_well_for_long_is_not() -> (
    None
):
    now = Now()
    breakers = breakers_at(now)
    breakers.failed(D, Failure.REFUSED)
    heal(breakers, now)
    now.value += SETTINGS.max_ejection_s - 0.1
    breakers.failed(D, Failure.REFUSED)
    now.value += 2 * EJECTION_S - 0.1
    assert breakers.state(D) is BreakerState.OPEN
    heal(breakers, now, 0.1)
    now.value += SETTINGS.max_ejection_s
    breakers.failed(D, Failure.REFUSED)
    now.value += EJECTION_S
    assert breakers.state(D) is BreakerState.HALF_OPEN


# Slow start


def test_the_share_of_a_node_that_is_well_again_grows() -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.failed(D, Failure.REFUSED)
    heal(breakers, now)
    assert breakers.state(D) is BreakerState.STARTING
    shares = []
    for _ in range(4):
        shares.append(share_of(breakers))
        now.value += SLOW_START_S / 4
    assert shares == pytest.approx([0.0, 0.25, 0.5, 0.75], abs=0.05)
    assert share_of(breakers) == 1.0
    assert breakers.state(D) is BreakerState.CLOSED


def test_the_same_draws_have_the_same_answers() -> None:
    def answers() -> list[bool]:
        now = Now()
        breakers = breakers_at(now)
        breakers.failed(D, Failure.REFUSED)
        heal(breakers, now)
        now.value += SLOW_START_S / 2
        return [breakers.avoided(D) for _ in range(50)]

    assert answers() == answers()


def test_nodes_that_are_there_from_the_beginning_have_their_share_at_once() -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.seen({"d1", "d2"})
    now.value = SLOW_START_S - 0.1
    breakers.seen({"d1", "d2", "d3"})
    assert [share_of(breakers, node_id) for node_id in ("d1", "d2", "d3")] == [1.0, 1.0, 1.0]


def test_a_node_that_joins_a_running_pool_gets_a_growing_share() -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.seen({"d1", "d2"})
    now.value = SLOW_START_S
    for _ in range(3):
        breakers.seen({"d1", "d2", "d3"})
        now.value += SLOW_START_S / 6
    assert breakers.state(node("d3")) is BreakerState.STARTING
    assert share_of(breakers, "d3") == pytest.approx(0.5, abs=0.05)
    assert share_of(breakers, "d1") == 1.0
    now.value += SLOW_START_S / 2
    assert share_of(breakers, "d3") == 1.0


def test_without_slow_start_a_node_has_its_share_at_once() -> None:
    now = Now()
    breakers = breakers_at(now, slow_start_s=0.0)
    breakers.seen({"d2"})
    breakers.seen({"d1", "d2"})
    assert share_of(breakers) == 1.0
    breakers.failed(D, Failure.REFUSED)
    heal(breakers, now)
    assert breakers.state(D) is BreakerState.CLOSED


# Memory and settings


def test_nodes_that_are_gone_are_forgotten() -> None:
    breakers = breakers_at(Now())
    breakers.failed(P, Failure.REFUSED)
    breakers.failed(D, Failure.REFUSED)
    breakers.forget({"p1"})
    assert (breakers.avoided(P), breakers.avoided(D)) == (True, False)


def test_nodes_that_come_and_go_leave_nothing_behind() -> None:
    now = Now()
    breakers = breakers_at(now)
    for number in range(1_000):
        now.value = number
        listed = {f"d{number}", f"d{number + 1}"}
        breakers.seen(listed)
        breakers.forget(listed)
        breakers.failed(node(f"d{number}"), Failure.REFUSED)
    assert len(breakers._circuits) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"window_s": 0.0},
        {"faults": 0},
        {"share": 1.5},
        {"share": -0.1},
        {"factor": 0.5},
        {"ejection_s": float("nan")},
        {"max_ejection_s": 1.0},
        {"slow_start_s": -1.0},
        {"slow_start_s": float("inf")},
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        BreakerSettings(**wrong)


def test_all_are_well_until_one_fails_and_again_once_it_has_started() -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.seen(["p1", "d1"])
    assert breakers.all_well
    breakers.failed(D, Failure.REFUSED)
    assert not breakers.all_well
    heal(breakers, now)
    assert not breakers.all_well, "it has only a share of the requests yet"
    now.value += SLOW_START_S
    assert breakers.all_well


def test_a_node_that_comes_later_is_not_well_until_it_has_started() -> None:
    now = Now()
    breakers = breakers_at(now)
    breakers.seen(["d1"])
    now.value += SLOW_START_S
    breakers.seen(["d1", "d2"])
    assert not breakers.all_well
    breakers.forget(["d1"])
    assert breakers.all_well


def test_peers_are_known_before_anything_is_sent_to_them() -> None:
    now = Now()
    breakers, pool = breakers_at(now), [node(f"d{number}") for number in range(1, 5)]
    breakers.seen([each.node_id for each in pool])
    breakers.know(pool)
    for _ in range(FAULTS):
        breakers.failed(D, Failure.FAULT)
        breakers.answered(pool[1])
    assert breakers.state(D) is BreakerState.OPEN
