"""Random faults, one after the other and some at once, for as long as a run lasts."""

import asyncio
import time
from collections.abc import Callable
from random import Random

from backhaul_local.stack import Stack
from tests.soak.faults import Act, Fault, NotNowError

_MEND_S = 120.0
_AGAIN_S = 0.5
"""Pause between two tries to mend, in which other faults end."""

Draw = Callable[[Random], Fault]
"""Draws the next fault."""


class Chaos:
    """Lets faults happen to a stack; which, when and for how long comes from a seed."""

    def __init__(self, stack: Stack, draw: Draw, lock: asyncio.Lock, *, seed: int, every_s: float) -> None:
        """``every_s``: mean pause between two faults, seconds. They may overlap, but not on the same subject.

        Processes are started and killed under the lock.
        """
        self.happened: list[str] = []
        self.missed: list[str] = []
        """What could not begin, because what it needs was down."""
        self._stack = stack
        self._draw = draw
        self._rng = Random(f"chaos-{seed}")
        self._every_s = every_s
        self._running: set[str] = set()
        self._lock = lock

    async def run(self, done: asyncio.Event) -> None:
        """Goes on until ``done``, then waits until every fault has been mended."""
        async with asyncio.TaskGroup() as group:
            while not done.is_set():
                fault = self._draw(self._rng)
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
        hold_s = fault.hold_s * self._rng.uniform(0.3, 1.5)
        try:
            await self._act(fault.begin)
            self.happened.append(fault.name)
            await asyncio.sleep(hold_s)
        except (OSError, NotNowError):
            self.missed.append(fault.name)
        finally:
            await self._mend(fault)
            self._running.discard(subject)

    async def _mend(self, fault: Fault) -> None:
        """Tries until it succeeds. Raises NotNowError when it does not for long."""
        deadline = time.monotonic() + _MEND_S
        while True:
            try:
                await self._act(fault.end)
            except OSError:
                # The engine that misbehaved is down.
                return
            except NotNowError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    async def _act(self, act: Act) -> None:
        async with self._lock:
            await asyncio.to_thread(act, self._stack)
