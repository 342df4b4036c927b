"""How long something took to work again after a fault."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import grpc

from backhaul_common.errors import BackhaulError

_IN_A_ROW = 5
_PAUSE_S = 0.02


async def recovered(name: str, attempt: Callable[[], Awaitable[object]], *, within_s: float) -> float:
    """Returns the seconds from now until ``attempt`` works (is true) and goes on to work; prints them under ``name``.

    An attempt that raises a gRPC or Backhaul error, or a TimeoutError, has failed. Fails the test after ``within_s``
    seconds.
    """
    began = time.monotonic()
    worked_at, worked_count = began, 0
    while worked_count < _IN_A_ROW:
        try:
            works = bool(await attempt())
        except (grpc.aio.AioRpcError, BackhaulError, TimeoutError):
            works = False
        worked_at = time.monotonic() if works and not worked_count else worked_at
        worked_count = (worked_count + 1) * works
        assert time.monotonic() - began < within_s, f"{name}: not within {within_s} s"
        await asyncio.sleep(_PAUSE_S)
    took_s = worked_at - began
    sys.stdout.write(f"recovery: {name}: {took_s:.2f} s (bound {within_s:g} s)\n")
    return took_s
