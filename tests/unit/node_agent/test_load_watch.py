"""What watchers of the engines' load are told, and when."""

import asyncio
from contextlib import aclosing

import pytest

from backhaul_common.errors import UnavailableError
from backhaul_node_agent.core.engine_loads import EngineLoad
from backhaul_node_agent.load_watch import LIFE_SIGN_S, PAUSE_S, Loads, LoadWatch
from tests.fakes.clock import FakeClock, settle


class Bench:
    """A watch over loads that the test sets, and those who watch."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.loads: Loads = ()
        self.watch = LoadWatch(lambda now: self.loads, self.clock)
        self.watchers: list[asyncio.Task[None]] = []

    async def becomes(self, running: int) -> None:
        """Lets one engine have so many requests, ticks, and lets everybody hear of it."""
        self.loads = (EngineLoad("e0", running, 0, 0.0, None),)
        self.watch.tick()
        await settle()

    async def begin(self, reading: asyncio.Event | None = None) -> list[int | None]:
        """Lets one more watch while `reading` is set; returns what it hears, None for a message without engines."""
        heard: list[int | None] = []
        self.watchers.append(asyncio.create_task(self._read(heard, reading)))
        await settle()
        return heard

    async def _read(self, heard: list[int | None], reading: asyncio.Event | None) -> None:
        async with aclosing(self.watch.watch()) as news:
            async for loads in news:
                heard.append(loads[0].running_count if loads else None)
                if reading is not None:
                    await reading.wait()


@pytest.fixture
def bench(no_leaks: None) -> Bench:
    return Bench()


async def ended(bench: Bench) -> None:
    """Ends all watches, in the way that their contract says."""
    bench.watch.end()
    await bench.clock.advance(PAUSE_S)
    for watcher in bench.watchers:
        with pytest.raises(UnavailableError, match="shutting down"):
            watcher.result()


async def test_the_first_message_comes_at_once_whatever_is_known(bench: Bench) -> None:
    assert await bench.begin() == [None]
    await bench.becomes(3)
    assert await bench.begin() == [3]
    await ended(bench)


async def test_every_watcher_hears_of_a_change(bench: Bench) -> None:
    first, second = await bench.begin(), await bench.begin()
    await bench.clock.advance(PAUSE_S)
    await bench.becomes(1)
    assert first == second == [None, 1]
    await ended(bench)


async def test_without_a_change_there_is_a_sign_of_life_and_no_more(bench: Bench) -> None:
    await bench.becomes(1)
    heard = await bench.begin()
    await bench.clock.advance(LIFE_SIGN_S - 0.1)
    await bench.becomes(1)
    assert heard == [1]
    await bench.clock.advance(0.2)
    await bench.becomes(1)
    await bench.becomes(1)
    assert heard == [1, 1]
    await ended(bench)


async def test_changes_that_follow_fast_are_told_as_one(bench: Bench) -> None:
    heard = await bench.begin()
    for running in range(1, 6):
        await bench.becomes(running)
        await bench.clock.advance(PAUSE_S / 10)
    assert heard == [None]
    await bench.clock.advance(PAUSE_S)
    assert heard == [None, 5]
    await ended(bench)


async def test_a_slow_watcher_holds_nobody_up_and_finds_the_latest_alone(bench: Bench) -> None:
    reading = asyncio.Event()
    slow, quick = await bench.begin(reading), await bench.begin()
    for running in range(20):
        await bench.clock.advance(PAUSE_S)
        await bench.becomes(running)
    assert (slow, quick) == ([None], [None, *range(20)])
    reading.set()
    await bench.clock.advance(PAUSE_S)
    await bench.clock.advance(PAUSE_S)
    assert slow == [None, 19]
    await ended(bench)


async def test_no_watch_begins_once_all_have_ended(bench: Bench) -> None:
    bench.watch.end()
    assert await bench.begin() == []
    await ended(bench)
