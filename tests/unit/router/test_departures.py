"""Legs that wait at nodes that go."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from backhaul_router.core.engines import EngineError, Failure
from backhaul_router.core.nodes import Node, NodeState, NodeTable
from backhaul_router.departures import Departures
from tests.unit.router.ports import FakeClock
from tests.unit.router.test_nodes import node

D1, D2 = node("d1"), node("d2")


class Bench:
    """Nodes d1 and d2 that legs may wait at."""

    def __init__(self) -> None:
        self.clock, self.table = FakeClock(), NodeTable()
        self.table.replace([D1, D2])
        self.departures = Departures(self.table, self.clock, patience_s=30.0)

    async def wait_at(self, at: Node) -> None:
        async with self.departures.waiting_at(at):
            await asyncio.Event().wait()

    def unready(self, at: Node, state: NodeState = NodeState.NOT_READY) -> None:
        self.table.change([node(at.node_id, state=state)], [])

    async def passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.departures.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def ended(task: asyncio.Task[None]) -> bool:
    await asyncio.wait([task], timeout=0)
    return task.done()


async def started(coroutine: Awaitable[None]) -> asyncio.Task[None]:
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    return task


async def left(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def removed(bench: Bench) -> None:
    bench.unready(D1)
    bench.table.change([], ["d1"])


def moved(bench: Bench) -> None:
    bench.table.change([node("d1", engine_url="http://elsewhere:2")], [])


def orphan_dropped(bench: Bench) -> None:
    bench.table.change([], ["d1"])
    bench.table.drop_orphan("d1")


@pytest.mark.parametrize("goes", [removed, moved, orphan_dropped])
async def test_a_leg_at_a_node_that_has_gone_ends_and_no_other(bench: Bench, goes: Callable[[Bench], None]) -> None:
    there, here = await started(bench.wait_at(D1)), await started(bench.wait_at(D2))
    goes(bench)
    await bench.passes(0.0)
    with pytest.raises(EngineError) as caught:
        await there
    assert caught.value.failure is Failure.GONE
    assert not await ended(here)
    await left(here)


async def test_a_node_that_is_not_ready_has_gone_after_a_while(bench: Bench) -> None:
    task = await started(bench.wait_at(D1))
    bench.unready(D1)
    await bench.passes(0.0)
    await bench.passes(29.0)
    assert not await ended(task)
    await bench.passes(1.0)
    with pytest.raises(EngineError):
        await task


async def test_a_node_that_is_well_again_in_time_has_not_gone(bench: Bench) -> None:
    task = await started(bench.wait_at(D1))
    for _ in range(3):
        bench.unready(D1)
        await bench.passes(20.0)
        bench.table.change([D1], [])
        await bench.passes(20.0)
    assert not await ended(task)
    await left(task)


@pytest.mark.parametrize("state", [NodeState.DRAINING, NodeState.READY])
async def test_a_node_that_drains_or_lost_only_its_agent_has_not_gone(bench: Bench, state: NodeState) -> None:
    task = await started(bench.wait_at(D1))
    bench.unready(D1, state)
    await bench.passes(100.0)
    bench.table.change([], ["d1"])
    await bench.passes(100.0)
    assert not await ended(task)
    await left(task)


async def test_a_leg_between_two_nodes_that_go_together_ends_once(bench: Bench) -> None:
    async def wait() -> None:
        async with bench.departures.waiting_at(D1), bench.departures.waiting_at(D2, Failure.SOURCE_GONE):
            await asyncio.Event().wait()

    task = await started(wait())
    for gone in (D1, D2):
        bench.unready(gone)
        bench.table.change([], [gone.node_id])
    await bench.passes(0.0)
    with pytest.raises(EngineError) as caught:
        await task
    assert caught.value.failure is Failure.GONE


async def test_a_leg_that_comes_while_others_are_being_ended_is_not_forgotten(bench: Bench) -> None:
    first = await started(bench.wait_at(D1))
    removed(bench)
    bench.table.drop_orphan("d1")
    bench.departures.look()
    second = asyncio.ensure_future(bench.wait_at(D1))
    with pytest.raises(EngineError):
        await first
    await bench.passes(0.0)
    await bench.passes(0.0)
    assert await ended(second)
    with pytest.raises(EngineError):
        await second


async def test_a_leg_that_has_its_answer_is_left_alone(bench: Bench) -> None:
    async with bench.departures.waiting_at(D1):
        pass
    removed(bench)
    await bench.passes(0.0)


async def test_other_time_outs_stay_what_they_are(bench: Bench) -> None:
    with pytest.raises(TimeoutError):
        async with bench.departures.waiting_at(D1):
            raise TimeoutError
