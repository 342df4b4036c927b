"""Random faults, one after the other and some at once, for as long as a run lasts."""

import asyncio
from collections.abc import Sequence
from random import Random

from backhaul_local.stack import Stack
from tests.soak.faults import Act, Fault


class Chaos:
    """Lets faults happen to a stack; which, when and for how long comes from a seed."""

    def __init__(self, stack: Stack, faults: Sequence[Fault], *, seed: int, every_s: float) -> None:
        """``every_s``: mean pause between two faults, seconds. They may overlap; the same one never does."""
        self.happened: list[str] = []
        self._stack = stack
        self._faults = faults
        self._rng = Random(f"chaos-{seed}")
        self._every_s = every_s
        self._running: set[str] = set()
        # Processes are started and killed from one thread at a time.
        self._lock = asyncio.Lock()

    async def run(self, done: asyncio.Event) -> None:
        """Goes on until ``done``, then waits until every fault has been mended."""
        async with asyncio.TaskGroup() as group:
            while not done.is_set():
                fault = self._rng.choice(self._faults)
                subject = fault.name.partition(" ")[2]
                if subject not in self._running:
                    group.create_task(self._happen(fault, subject))
                pause = self._rng.expovariate(1 / self._every_s)
                try:
                    async with asyncio.timeout(pause):
                        await done.wait()
                except TimeoutError:
                    continue

    async def _happen(self, fault: Fault, subject: str) -> None:
        self._running.add(subject)
        self.happened.append(fault.name)
        try:
            await self._act(fault.begin)
            await asyncio.sleep(fault.hold_s * self._rng.uniform(0.3, 1.5))
        finally:
            await self._act(fault.end)
            self._running.discard(subject)

    async def _act(self, act: Act) -> None:
        async with self._lock:
            await asyncio.to_thread(act, self._stack)
