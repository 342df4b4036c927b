"""Running parts of one stream side by side."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from backhaul_common.errors import UnavailableError


async def run_until_first(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs all parts until one returns or raises, ends the others, and raises what it raised.

    Cancellation ends all parts; none outlives the call.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def refuse_after(stopping: asyncio.Event) -> None:
    """Raises UnavailableError (SHUTTING_DOWN) once ``stopping`` is set."""
    await stopping.wait()
    raise UnavailableError("SHUTTING_DOWN", "this replica is shutting down: go to another one")
