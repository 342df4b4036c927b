"""What is said where there is no terminal."""

from io import StringIO

import pytest
from rich.console import Console

from backhaul_local.progress import ConsoleSteps
from tests.fakes.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def out() -> StringIO:
    return StringIO()


@pytest.fixture
def steps(clock: FakeClock, out: StringIO) -> ConsoleSteps:
    return ConsoleSteps(Console(file=out), clock.monotonic)


async def test_a_step_that_takes_long_says_every_ten_seconds_that_it_lives(
    steps: ConsoleSteps, clock: FakeClock, out: StringIO
) -> None:
    steps.begin("Starting prefill-1")
    steps.begin("Starting decode-1")
    for _ in range(25):
        await clock.advance(1)
        steps.waiting()
    steps.end("Starting prefill-1")
    assert out.getvalue().splitlines() == [
        "Starting prefill-1 ...",
        "Starting decode-1 ...",
        "  still at it, 10 s: Starting prefill-1 and 1 more",
        "  still at it, 20 s: Starting prefill-1 and 1 more",
        "Starting prefill-1: done in 25.0 s",
    ]


async def test_nothing_is_said_when_nothing_runs(steps: ConsoleSteps, clock: FakeClock, out: StringIO) -> None:
    await clock.advance(60)
    steps.waiting()
    assert out.getvalue() == ""
