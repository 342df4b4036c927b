"""What is known of engines' load, and for how long."""

import pytest

from backhaul_router.core.routing.reports import MAX_AGE_S, EngineReport, Reports
from tests.fakes.clock import FakeClock

KEY = ("d1", "e1")
BUSY = EngineReport(running=3, waiting=2, kv_usage=0.5, free_blocks=100)
IDLE = EngineReport(running=0, waiting=0, kv_usage=0.0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def reports(clock: FakeClock) -> Reports:
    return Reports(clock.monotonic)


def test_the_last_word_about_an_engine_counts(reports: Reports) -> None:
    reports.take(KEY, IDLE)
    reports.take(KEY, BUSY)
    assert reports.of(KEY) == BUSY


def test_nothing_is_known_of_an_engine_nobody_spoke_of(reports: Reports) -> None:
    reports.take(KEY, BUSY)
    assert reports.of(("d1", "e2")) is None
    assert reports.of(("d2", "e1")) is None


async def test_what_is_old_says_nothing_about_now(reports: Reports, clock: FakeClock) -> None:
    reports.take(KEY, BUSY)
    await clock.advance(MAX_AGE_S)
    assert reports.of(KEY) == BUSY
    await clock.advance(0.01)
    assert reports.of(KEY) is None


async def test_each_engine_ages_by_itself(reports: Reports, clock: FakeClock) -> None:
    other = ("d1", "e2")
    reports.take(KEY, BUSY)
    await clock.advance(MAX_AGE_S)
    reports.take(other, IDLE)
    await clock.advance(1)
    assert reports.of(KEY) is None
    assert reports.of(other) == IDLE


def test_a_node_that_names_its_engines_anew_drops_the_incarnation_before(reports: Reports) -> None:
    reports.take_all("d1", {"e1": BUSY, "e2": IDLE})
    reports.take_all("d1", {"e1": IDLE, "e3": BUSY})
    assert [reports.of(("d1", engine_id)) for engine_id in ("e1", "e2", "e3")] == [IDLE, None, BUSY]


def test_a_node_that_left_is_forgotten_and_no_other(reports: Reports) -> None:
    reports.take_all("d1", {"e1": BUSY})
    reports.take_all("d2", {"e1": IDLE})
    reports.drop(["d1", "never known"])
    assert reports.of(("d1", "e1")) is None
    assert reports.of(("d2", "e1")) == IDLE
