"""When a call is made again: only where that is safe."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from backhaul_client.errors import BackhaulError, UnavailableError, error_from

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often, and how long after one another.

    A turn is made again only if the router says that it began nothing; a call that is idempotent also if there was no
    connection. `attempts=1` makes every call once.
    """

    attempts: int = 3
    """Calls at most, the first one included."""
    base_s: float = 0.1
    """Wait before the second call, seconds, where the router names no time; doubled each time. Up to half is added."""
    longest_s: float = 10.0
    """A router that names a longer time is not waited for."""
    rng: random.Random = field(default_factory=random.Random)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def wait_s(self, error: BackhaulError, attempt: int, *, idempotent: bool, left_s: float) -> float | None:
        """Returns how long to wait before the next call, seconds; None when there is to be none.

        ``attempt`` counts from 1; ``left_s``: until the deadline, seconds.
        """
        safe = error.nothing_begun or (idempotent and isinstance(error, UnavailableError))
        if not safe or attempt >= self.attempts:
            return None
        named = error.retry_after_s
        wait_s = named if named is not None else self.base_s * 2 ** (attempt - 1)
        wait_s *= 1 + self.rng.random() / 2
        return wait_s if wait_s < left_s and (named or 0.0) <= self.longest_s else None

    async def run(self, call: Callable[[float], Awaitable[T]], *, timeout_s: float, idempotent: bool) -> T:
        """Makes a call, which is given how long it may take, again and again. Raises BackhaulError."""
        monotonic = asyncio.get_running_loop().time
        deadline = monotonic() + timeout_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return await call(deadline - monotonic())
            except grpc.aio.AioRpcError as failure:
                error = error_from(failure)
                left_s = deadline - monotonic()
                wait_s = self.wait_s(error, attempt, idempotent=idempotent, left_s=left_s)
                if wait_s is None:
                    raise error from failure
            await self.sleep(wait_s)
