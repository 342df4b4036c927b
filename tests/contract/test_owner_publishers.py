"""Publishers of the same engine, one after the other."""

import asyncio

from backhaul_common.clock import SystemClock
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.publishers import Publishers
from backhaul_node_agent.registries import Registries
from tests.fakes.eventually import eventually
from tests.fakes.registry import FakeRegistry
from tests.unit.node_agent.owned import block_set


async def test_an_engine_that_is_back_publishes_after_the_end_of_what_it_published_before() -> None:
    """Else the end of the old stream would be taken for that of the new one."""
    heard: list[ev.Event] = []
    joined = asyncio.Event()
    joined.set()
    async with FakeRegistry() as registry, Registries([registry.address]) as registries:
        publishers = Publishers(registries=registries, node_id="node-1", clock=SystemClock(), joined=joined)
        running = asyncio.create_task(publishers.run(heard.append))
        registry.acknowledging.clear()
        publishers.publish("engine-1", block_set())
        await eventually(lambda: bool(registry.batches))
        publishers.forget("engine-1")
        publishers.open("engine-1")
        await eventually(lambda: len(heard) >= 3, timeout_s=10)
        assert heard == [ev.PublisherUp("engine-1"), ev.PublisherDown("engine-1"), ev.PublisherUp("engine-1")]
        running.cancel()
        await asyncio.wait([running])
