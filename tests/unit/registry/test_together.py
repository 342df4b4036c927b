import asyncio

import pytest

from backhaul_common.errors import UnavailableError
from backhaul_registry.together import refuse_after, run_until_first


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


async def test_the_first_to_return_ends_the_others(no_leaks: None) -> None:
    ended: list[str] = []
    await run_until_first(forever(ended), asyncio.sleep(0))
    assert ended == ["ended"]


async def test_the_first_error_is_raised(no_leaks: None) -> None:
    ended: list[str] = []
    stopping = asyncio.Event()
    stopping.set()
    with pytest.raises(UnavailableError, match="SHUTTING_DOWN"):
        await run_until_first(forever(ended), refuse_after(stopping))
    assert ended == ["ended"]


async def test_cancellation_ends_all(no_leaks: None) -> None:
    ended: list[str] = []
    task = asyncio.create_task(run_until_first(forever(ended), forever(ended)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["ended", "ended"]
