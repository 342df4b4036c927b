"""One stream of the external processing protocol: what the gateway says of one HTTP request, and its end."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self

import grpc

from backhaul.envoy.v3 import ext_proc_pb2 as pb

_WAITING = 4
"""Messages that have come and are not yet taken. With more, gRPC's flow control holds the gateway back."""

_OF_REQUESTS = ("request_headers", "request_body", "request_trailers")


class GoneError(ConnectionError):
    """The gateway has ended its stream: the client has left, or everything has been sent."""


class Exchange:
    """Reads ahead, so that the gateway's end of the stream is seen at any moment.

    Enter it in the task that takes the messages; leaving ends the reading.
    """

    def __init__(
        self,
        requests: AsyncIterable[pb.ProcessingRequest],
        write: Callable[[pb.ProcessingResponse], Awaitable[None]],
    ) -> None:
        self._requests = requests
        self._inbox: asyncio.Queue[pb.ProcessingRequest | None] = asyncio.Queue(_WAITING)
        self._over = False
        self._scope: asyncio.Timeout | None = None
        self._reader: asyncio.Task[None] | None = None
        self._write = write

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._reader is not None
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    async def next(self) -> pb.ProcessingRequest:
        """Returns the next message. Raises GoneError when there will be none."""
        message = None if self._over and self._inbox.empty() else await self._inbox.get()
        if message is None:
            raise GoneError
        return message

    async def write(self, message: pb.ProcessingResponse) -> None:
        """Sends a message; waits while the gateway has no room for it. Raises GoneError when it cannot be sent."""
        try:
            await self._write(message)
        except grpc.aio.InternalError as error:
            # The call has ended under it. Of this gRPC may tell first, and only then of the end itself.
            raise GoneError from error

    def end(self) -> None:
        """There will be no further message."""
        self._over = True
        # For who waits for one: the inbox is empty then.
        with suppress(asyncio.QueueFull):
            self._inbox.put_nowait(None)

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """Inside, whatever runs ends when the gateway ends its stream, or answers the client itself.

        Raises GoneError then.
        """
        try:
            async with asyncio.timeout(None) as scope:
                self._scope = scope
                yield
        except TimeoutError:
            if scope.expired():
                raise GoneError from None
            raise
        finally:
            self._scope = None

    async def _read(self) -> None:
        try:
            async for message in self._requests:
                if message.WhichOneof("request") not in _OF_REQUESTS:
                    self._interrupt()
                await self._inbox.put(message)
        finally:
            self._interrupt()
            self.end()

    def _interrupt(self) -> None:
        if self._scope is not None:
            self._scope.reschedule(0)
            # What is ending may take a moment, in which more is seen; a scope that ends cannot be told again.
            self._scope = None
