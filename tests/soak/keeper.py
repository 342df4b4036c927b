"""Starts processes again that nobody ended, as a supervisor does on a real machine."""

import asyncio

from backhaul_local.stack import Stack

_LOOK_EVERY_S = 1.0


class Keeper:
    """Looks after the processes of a stack. Starts them under the lock."""

    def __init__(self, stack: Stack, lock: asyncio.Lock) -> None:
        self.deaths: list[str] = []
        """Processes that died by themselves."""
        self._stack = stack
        self._lock = lock

    async def run(self) -> None:
        """Looks every second until cancelled."""
        while True:
            async with self._lock:
                for name in filter(self._died, self._stack.process_names):
                    self.deaths.append(name)
                    await asyncio.to_thread(self._stack.restart, name, wait=False)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _died(self, name: str) -> bool:
        process = self._stack.process(name)
        return not process.running and not process.ended_here
