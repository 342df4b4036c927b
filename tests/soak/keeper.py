"""Starts processes again that nobody ended, as a supervisor does on a real machine."""

import asyncio

from backhaul_local.stack import Stack

_LOOK_EVERY_S = 1.0

_LAST_LINES = 200
"""Long enough for a panic of etcd with its stack."""
CANCELLED_READ = " (cancelled read)"
_PANIC = "panic: unexpected error during txn"
"""Last words of an etcd before 3.5.5 whose connection broke while it read (etcd-io/etcd#14110)."""


class Keeper:
    """Looks after the processes of a stack. Starts them under the lock."""

    def __init__(self, stack: Stack, lock: asyncio.Lock) -> None:
        self.deaths: list[str] = []
        """Processes that died by themselves; etcd's of a cancelled read say so."""
        self._stack = stack
        self._lock = lock

    async def run(self) -> None:
        """Looks every second until cancelled."""
        while True:
            async with self._lock:
                for name in filter(self._died, self._stack.process_names):
                    known = name.startswith("etcd") and _PANIC in self._stack.process(name).log_tail(_LAST_LINES)
                    self.deaths.append(f"{name}{CANCELLED_READ}" if known else name)
                    await asyncio.to_thread(self._stack.restart, name, wait=False)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _died(self, name: str) -> bool:
        process = self._stack.process(name)
        return not process.running and not process.ended_here
