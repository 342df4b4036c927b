"""The registries that an agent may talk to, how often it tries them, and how its streams to them end.

The agent keeps streams to the current one that reconnect for ever, moving on when it fails.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from backhaul_common.errors import BackhaulError, UnavailableError
from backhaul_common.grpc_client import Connect, open_channel, to_error

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0


class Registries:
    """Channels to all registries, one of them current. Owned by its context."""

    def __init__(self, addresses: Sequence[str], connect: Connect = open_channel) -> None:
        self._channels = [connect(address) for address in addresses]
        self._current = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        """Channel to the current registry."""
        return self._channels[self._current]

    def give_up(self, channel: grpc.aio.Channel) -> None:
        """Moves on to the next registry, unless somebody did already."""
        if channel is self.channel:
            self._current = (self._current + 1) % len(self._channels)


def pauses_between_attempts() -> Iterator[float]:
    """Yields jittered pauses between attempts, growing."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


@contextlib.asynccontextmanager
async def exchange(call: grpc.aio.StreamStreamCall[Any, Any], timeout_s: float | None) -> AsyncIterator[None]:
    """Bounds what is written to and read from a stream. Raises BackhaulError when it has ended or takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    except asyncio.InvalidStateError as error:
        raise await end_of(call) from error
    except TimeoutError as error:
        raise UnavailableError("REGISTRY_SILENT", "the registry does not answer") from error


async def end_of(call: grpc.aio.StreamStreamCall[Any, Any]) -> BackhaulError:
    """Returns why a stream has ended."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return UnavailableError("STREAM_ENDED", "the registry ended the stream")
    initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
    return to_error(grpc.aio.AioRpcError(code, initial, trailing, await call.details()))
