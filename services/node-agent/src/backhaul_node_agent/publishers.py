"""The pointers of all engines of the node: one publisher for each incarnation."""

import asyncio
import contextlib

from backhaul_common.clock import Clock
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.publisher import Publisher
from backhaul_node_agent.registries import Registries


class Publishers:
    """One publisher per engine incarnation."""

    def __init__(self, *, registries: Registries, node_id: str, clock: Clock, joined: asyncio.Event) -> None:
        self._registries = registries
        self._node_id = node_id
        self._clock = clock
        self._joined = joined
        self._publishers: dict[str, Publisher] = {}
        self._closing: set[Publisher] = set()
        self._ended = asyncio.Event()
        # Holds no more than there are engines.
        self._started: asyncio.Queue[tuple[str, Publisher]] = asyncio.Queue()

    @property
    def purging(self) -> bool:
        """Whether pointers of an engine that is gone are still being removed."""
        return bool(self._closing)

    def open(self, engine_id: str) -> None:
        """Starts publishing for an engine, unless that has been done."""
        if engine_id not in self._publishers:
            publisher = Publisher(
                registries=self._registries,
                node_id=self._node_id,
                engine_id=engine_id,
                clock=self._clock,
                joined=self._joined,
            )
            self._publishers[engine_id] = publisher
            self._started.put_nowait((engine_id, publisher))

    def publish(self, engine_id: str, block_set: BlockSet) -> None:
        """Wants a set's pointers written."""
        self.open(engine_id)
        self._publishers[engine_id].publish(block_set)

    def unpublish(self, engine_id: str, block_set: BlockSet) -> None:
        """Wants a set's pointers removed."""
        self.open(engine_id)
        self._publishers[engine_id].unpublish(block_set)

    def forget(self, engine_id: str) -> None:
        """Ends all pointers of an engine."""
        publisher = self._publishers.pop(engine_id, None)
        if publisher is not None:
            self._closing.add(publisher)
            publisher.close()

    def lease_lost(self) -> None:
        """Ends the pointers until the node has joined again."""
        for publisher in self._publishers.values():
            publisher.wake()

    async def close(self, timeout_s: float) -> None:
        """Ends all pointers; what is not ended in time is left to their leases."""
        for engine_id in list(self._publishers):
            self.forget(engine_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._closing:
                    await self._ended.wait()
                    self._ended.clear()

    async def run(self, hear: ev.Hear) -> None:
        """Runs all publishers until cancelled."""
        latest: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                engine_id, publisher = await self._started.get()
                latest = {name: task for name, task in latest.items() if not task.done()}
                latest[engine_id] = group.create_task(self._run_one(publisher, latest.get(engine_id), hear))

    async def _run_one(self, publisher: Publisher, before: asyncio.Task[None] | None, hear: ev.Hear) -> None:
        """Runs a publisher after the end of the one before it, of the same engine: what is heard stays in order."""
        try:
            if before is not None:
                await asyncio.wait([before])
            await publisher.run(hear)
        finally:
            self._closing.discard(publisher)
            self._ended.set()
