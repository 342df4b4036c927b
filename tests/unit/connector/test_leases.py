"""Deadlines that heartbeats moved reach the scheduler in its own clock, never later than they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_connector.leases import LOOKS, ConfirmedDeadlines, LeaseWatcher

EPOCH = 1000.0
"""How far the worker's clock is ahead of the scheduler's."""

moments = st.floats(0, 1e6)


def watcher(latency_s: float = 0.0) -> LeaseWatcher:
    """Returns a watcher that has seen one step, at scheduler clock 1."""
    made = LeaseWatcher()
    made.stepped(1.0, EPOCH + 1.0 + latency_s, {})
    return made


def test_a_deadline_that_moved_is_reported_once_in_the_schedulers_clock() -> None:
    leases = watcher()

    assert leases.changed({"a": EPOCH + 30.0, "b": EPOCH + 30.0}, EPOCH + 1.0) == {}
    assert leases.changed({"a": EPOCH + 60.0, "b": EPOCH + 30.0}, EPOCH + 2.0) == {"a": 60.0}
    assert leases.changed({"a": EPOCH + 60.0, "b": EPOCH + 30.0}, EPOCH + 3.0) == {}


def test_a_heartbeat_that_comes_before_the_first_look_counts() -> None:
    leases = watcher()
    leases.changed({}, EPOCH + 1.0)
    leases.stepped(1.1, EPOCH + 1.1, {"a": 30.0, "b": 30.0})

    # The worker brought "b" to its own clock a moment later than the watcher did.
    assert leases.changed({"a": EPOCH + 60.0, "b": EPOCH + 30.001}, EPOCH + 1.3) == {"a": 60.0}


def test_a_heartbeat_that_comes_while_a_look_is_under_way_counts() -> None:
    leases = watcher()
    held = {"a": EPOCH + 30.0, **{f"other-{n}": EPOCH + 30.0 for n in range(LOOKS)}}
    assert leases.changed(held, EPOCH + 1.0) == {}
    leases.stepped(1.1, EPOCH + 1.1, {"a": 30.0})

    assert leases.changed({**held, "a": EPOCH + 60.0}, EPOCH + 1.1) == {"a": 60.0}


def test_it_looks_four_times_a_second() -> None:
    leases = watcher()
    leases.changed({"a": EPOCH + 30.0}, EPOCH + 1.0)

    assert leases.changed({"a": EPOCH + 60.0}, EPOCH + 1.2) == {}
    assert leases.changed({"a": EPOCH + 60.0}, EPOCH + 1.25) == {"a": 60.0}


class CountedLeases(dict[str, float]):
    """A lease map that counts what is looked up."""

    looked_up = 0

    def get(self, key: str, default: float | None = None) -> float | None:  # type: ignore[override]  # no overloads
        self.looked_up += 1
        return super().get(key, default)


def test_no_step_looks_at_more_than_a_few_leases_and_all_are_looked_at_in_the_end() -> None:
    count = 3 * LOOKS + 1
    leases, private = watcher(), CountedLeases({f"r{number}": EPOCH + 30.0 for number in range(count)})
    for _ in range(4):
        leases.changed(private, EPOCH + 1.0)
    assert leases.recounted() == count
    private.update(dict.fromkeys(private, EPOCH + 60.0))
    moved: dict[str, float] = {}
    for _ in range(4):
        private.looked_up = 0
        moved |= leases.changed(private, EPOCH + 2.0)
        assert private.looked_up <= LOOKS

    assert moved == dict.fromkeys(private, 60.0)
    assert leases.changed(private, EPOCH + 3.0) == {}


def test_what_is_retained_during_a_look_that_takes_several_steps_is_known_afterwards() -> None:
    leases, private = watcher(), {f"r{number}": EPOCH + 30.0 for number in range(LOOKS + 1)}
    leases.changed(private, EPOCH + 1.0)
    leases.stepped(1.1, EPOCH + 1.1, {"new": 30.0})
    leases.changed(private, EPOCH + 1.1)

    assert leases.recounted() == LOOKS + 2
    assert leases.changed({"new": EPOCH + 60.0}, EPOCH + 2.0) == {"new": 60.0}


def test_a_lease_that_ends_during_a_look_is_no_lease() -> None:
    leases, private = watcher(), {f"r{number}": EPOCH + 30.0 for number in range(LOOKS + 1)}
    leases.changed(private, EPOCH + 1.0)
    leases.changed({}, EPOCH + 1.0)

    assert leases.recounted() == LOOKS


@given(latencies=st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_a_step_that_arrives_late_makes_deadlines_early_and_never_late(latencies: list[float]) -> None:
    leases = LeaseWatcher()
    for step, latency in enumerate(latencies, start=1):
        leases.stepped(float(step), EPOCH + step + latency, {})
    leases.changed({"a": EPOCH + 30.0}, EPOCH + 10.0)

    [deadline] = leases.changed({"a": EPOCH + 600.0}, EPOCH + 20.0).values()

    assert deadline == pytest.approx(600.0 - latencies[-1])


def test_one_slow_step_does_not_shorten_deadlines_for_ever() -> None:
    leases = watcher(latency_s=60.0)
    leases.changed({"a": EPOCH + 100.0}, EPOCH + 61.0)
    leases.stepped(62.0, EPOCH + 62.0, {})

    assert leases.changed({"a": EPOCH + 200.0}, EPOCH + 62.0) == {"a": 200.0}


def test_nothing_is_reported_before_the_schedulers_clock_is_known() -> None:
    leases = LeaseWatcher()
    leases.stepped(0.0, EPOCH, {})
    leases.changed({"a": EPOCH + 30.0}, EPOCH + 1.0)

    assert leases.changed({"a": EPOCH + 60.0}, EPOCH + 2.0) == {}


@pytest.mark.parametrize("private", [None, 5, [("a", 1.0)], {"a": "soon"}, {"a": 60}, {5: 60.0}, {"a": None}], ids=repr)
def test_a_lease_map_of_another_shape_gives_nothing(private: object) -> None:
    leases = watcher()
    leases.changed({"a": EPOCH + 30.0}, EPOCH + 1.0)

    assert leases.changed(private, EPOCH + 2.0) == {}


def test_a_lease_that_went_and_came_back_is_new() -> None:
    leases = watcher()
    leases.changed({"a": EPOCH + 30.0}, EPOCH + 1.0)
    leases.changed({}, EPOCH + 2.0)

    assert leases.changed({"a": EPOCH + 60.0}, EPOCH + 3.0) == {}


def test_a_deadline_is_confirmed_once_every_rank_has_moved_its_own() -> None:
    """A heartbeat that reached one rank only keeps nothing: the other one frees the blocks as before."""
    confirmed = ConfirmedDeadlines(2)

    assert confirmed.update({0: {"a": 60.0}}) == {}
    assert confirmed.update({0: {"a": 90.0}, 1: {"b": 70.0}}) == {}
    assert confirmed.update({1: {"a": 80.0}}) == {"a": 80.0}


def test_an_engine_of_one_rank_confirms_at_once() -> None:
    assert ConfirmedDeadlines(1).update({0: {"a": 60.0, "b": 70.0}}) == {"a": 60.0, "b": 70.0}


def test_what_was_freed_is_forgotten() -> None:
    confirmed = ConfirmedDeadlines(2)
    confirmed.update({0: {"a": 60.0}})
    confirmed.forget(["a", "unknown"])

    assert confirmed.update({1: {"a": 80.0}}) == {}


@given(
    reports=st.lists(st.dictionaries(st.integers(0, 2), st.dictionaries(st.sampled_from("abc"), moments)), max_size=8)
)
def test_no_rank_is_ever_asked_to_keep_blocks_longer_than_it_said(
    reports: list[dict[int, dict[str, float]]],
) -> None:
    confirmed, said = ConfirmedDeadlines(3), {}
    for report in reports:
        said.update({(rank, key): value for rank, moved in report.items() for key, value in moved.items()})
        for key, deadline in confirmed.update(report).items():
            assert deadline == min(said[rank, key] for rank in range(3))


def test_the_number_of_leases_is_told_when_it_changes() -> None:
    leases = watcher()
    assert leases.recounted() is None
    leases.changed({"a": EPOCH + 30.0, "b": EPOCH + 30.0, "odd": "soon"}, EPOCH + 1.0)
    assert (leases.recounted(), leases.recounted()) == (2, None)
    leases.changed({"c": EPOCH + 30.0, "b": EPOCH + 30.0}, EPOCH + 2.0)
    assert leases.recounted() is None
    leases.changed({}, EPOCH + 3.0)
    assert leases.recounted() == 0
