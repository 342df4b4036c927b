"""Runs coroutines for targets: all on one loop of the process, each with a limit."""

import asyncio
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

_LIMIT_S = 30.0


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns what a coroutine returns. Raises TimeoutError for one that hangs, AssertionError for tasks left over."""
    return _loop().run_until_complete(_alone(coroutine))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def _alone(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        async with asyncio.timeout(_LIMIT_S):
            return await coroutine
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
