"""The simulator's leases keep the rules of vLLM's worker, traps included."""

import pytest

from backhaul_simulator.leases import Leases

_EXTENSION_S = 20


def _leases(**deadlines: float) -> Leases:
    leases = Leases(_EXTENSION_S)
    leases.batch(deadlines)
    leases.send(deadlines, scheduler_clock=0.0, now=0.0)
    return leases


def test_a_lease_ends_at_its_deadline() -> None:
    leases = _leases(early=10.0, late=20.0)
    assert leases.expired(9.9) == set()
    assert leases.expired(10.0) == {"early"}
    assert leases.expired(15.0) == set()
    assert leases.expired(25.0) == {"late"}
    assert leases.deadlines == {}


def test_a_deadline_is_taken_over_into_the_workers_clock() -> None:
    leases = Leases(_EXTENSION_S)
    leases.batch(["a"])
    leases.send({"a": 1030.0}, scheduler_clock=1000.0, now=5.0)
    assert leases.deadlines == {"a": 35.0}


def test_a_heartbeat_moves_a_deadline_if_that_makes_it_later() -> None:
    leases = _leases(soon=10.0, far=1000.0)
    assert leases.notified([b"HB:soon,far,unknown"], now=5.0) == set()
    assert leases.deadlines == {"soon": 25.0, "far": 1000.0}
    assert leases.expired(10.0) == set()


def test_the_first_notification_frees_whether_anything_was_read_or_not() -> None:
    leases = _leases(a=10.0)
    assert leases.notified([b"a:1"], now=1.0) == {"a"}
    assert leases.notified([b"a:1"], now=1.0) == set(), "a second one is of nobody"
    assert leases.expired(11.0) == set()


def test_a_notification_with_more_consumers_waits_for_all() -> None:
    leases = _leases(a=10.0)
    assert leases.notified([b"a:2"], now=1.0) == set()
    assert leases.notified([b"a:2"], now=1.0) == {"a"}


def test_a_request_that_was_read_before_it_finished_gets_no_deadline() -> None:
    leases = Leases(_EXTENSION_S)
    leases.batch(["a"])
    assert leases.notified([b"a:1"], now=1.0) == {"a"}
    leases.send({"a": 10.0}, scheduler_clock=0.0, now=1.0)
    assert leases.deadlines == {}


def test_a_request_that_was_never_in_a_batch_is_pinned_for_ever() -> None:
    leases = Leases(_EXTENSION_S)
    leases.send({"a": 10.0}, scheduler_clock=0.0, now=0.0)
    assert leases.expired(1e9) == set()
    assert leases.notified([b"a:1"], now=0.0) == set()


def test_an_aborted_request_is_forgotten_and_must_have_no_deadline() -> None:
    leases = Leases(_EXTENSION_S)
    leases.batch(["a"])
    leases.drop(["a"])
    leases.send({"a": 10.0}, scheduler_clock=0.0, now=0.0)
    assert leases.deadlines == {}
    with pytest.raises(AssertionError, match="aborted after its deadline"):
        _leases(b=10.0).drop(["b"])
