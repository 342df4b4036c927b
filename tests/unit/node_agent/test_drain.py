"""The order in which a drain is carried out, and what the directory is told."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from backhaul_node_agent.core.draining import SETTLE_S, Load, Phase
from backhaul_node_agent.drain import Drain
from tests.fakes.clock import FakeClock, settle


class FakeNode:
    """All that a drain touches; `did` is what was done to it, in order."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.did: list[str] = []
        self.held_count, self.answers = 0, True

    def drain(self) -> int:
        self.did.append("drain")
        return self.held_count

    def awaited_count(self) -> int:
        return self.held_count

    async def close(self, timeout_s: float) -> None:
        self.did.append("close pointers")

    async def leave(self) -> None:
        self.did.append("leave")
        if self.answers:
            self.left.set()


class Bench:
    """A drain that runs, and what it says to the directory."""

    def __init__(self) -> None:
        self.clock, self.node = FakeClock(), FakeNode()
        self.said: list[str] = []
        self.drain = Drain(
            sets=self.node, pointers=self.node, membership=self.node, clock=self.clock, on_change=self._said
        )
        self.task = asyncio.create_task(self.drain.run())

    def _said(self) -> None:
        self.said.append(self.drain.reason)

    def seen(self, request_count: int | None) -> None:
        """The engines say what they have to do."""
        self.drain.on_load(Load(request_count, self.clock.monotonic()))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.task.cancel()
    await asyncio.wait([bench.task])


async def test_a_node_ends_its_pointers_and_leaves_once_nothing_runs_and_nothing_is_held(bench: Bench) -> None:
    bench.seen(1)
    bench.node.held_count = 1
    assert bench.drain.ask(60.0, retiring=True).phase is Phase.DRAINING
    await bench.clock.advance(SETTLE_S)
    bench.seen(0)
    await bench.clock.advance(1.0)
    assert bench.node.did == ["drain"]
    bench.node.held_count = 0
    await bench.clock.advance(0.1)
    assert bench.node.did == ["drain", "close pointers", "leave"]
    assert bench.drain.ask(60.0, retiring=True).phase is Phase.LEFT


async def test_a_node_leaves_at_its_deadline_whatever_runs(bench: Bench) -> None:
    bench.seen(3)
    bench.drain.ask(60.0, retiring=True)
    await bench.clock.advance(59.0)
    assert not bench.drain.over.is_set()
    await bench.clock.advance(1.1)
    assert bench.drain.over.is_set()


async def test_it_has_left_only_when_its_lease_has_ended(bench: Bench) -> None:
    bench.node.answers = False
    bench.drain.ask(0.0, retiring=True)
    await settle()
    assert bench.drain.over.is_set()
    assert bench.drain.ask(0.0, retiring=True).phase is Phase.DRAINING
    bench.node.left.set()
    await settle()
    assert bench.drain.ask(0.0, retiring=True).phase is Phase.LEFT


async def test_the_directory_hears_how_far_it_is_at_once_and_then_every_two_seconds(bench: Bench) -> None:
    bench.seen(2)
    bench.drain.ask(60.0, retiring=True)
    assert bench.said == ["draining: 2 requests run, 0 block sets are held, leaves in 60 s at the latest"]
    bench.seen(1)
    await bench.clock.advance(1.9)
    assert len(bench.said) == 1
    await bench.clock.advance(0.2)
    assert bench.said[1:] == ["draining: 1 request runs, 0 block sets are held, leaves in 58 s at the latest"]


async def test_an_end_that_is_brought_forward_counts_at_once(bench: Bench) -> None:
    bench.seen(1)
    bench.drain.ask(60.0, retiring=True)
    await bench.clock.advance(1.0)
    bench.drain.ask(0.0, retiring=False)
    await bench.clock.advance(0.1)
    assert bench.node.did[-1] == "leave"
    assert bench.drain.retiring
