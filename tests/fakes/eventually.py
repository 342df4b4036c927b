"""Waiting for things that happen soon, in tests with real I/O."""

import asyncio
from collections.abc import Awaitable, Callable


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 5.0) -> None:
    """Waits until ``condition`` holds, or fails the test after ``timeout_s`` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s} s"
        await asyncio.sleep(0.01)
