"""Tasks that a test must not leave behind."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.fakes.eventually import eventually


@asynccontextmanager
async def no_tasks_left(timeout_s: float = 5.0) -> AsyncIterator[None]:
    """Fails when tasks that began inside still run ``timeout_s`` seconds after the end."""
    before = asyncio.all_tasks()
    yield
    # Streams that were dropped end when they are collected.
    gc.collect()
    await eventually(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()}, timeout_s)
