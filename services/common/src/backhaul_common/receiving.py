"""Server interceptor that takes requests: in time, and only those that can be read."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError

from backhaul_common.errors import DeadlineExceededError, InvalidArgumentError
from backhaul_common.handlers import HANDLERS, Context, Handler, preceded

RECEIVE_S = 60.0
"""How long a request, or the first message of a stream, may take to come."""


class ReceivingInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose request does not come in time, or cannot be read.

    Of a stream of requests the first has that time; the others come when they come. gRPC itself waits for ever, reads
    requests where no interceptor is, and answers nobody before one has come: so calls with one request are taken as
    streams, of which the first message is the request. Goes inside all other interceptors.
    """

    def __init__(self, receive_s: float) -> None:
        self._receive_s = receive_s
        self._wrapped = lru_cache(HANDLERS)(self._wrap)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wraps the handler of one call. None, of an unknown method, is answered UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self._wrapped(handler)

    def _wrap(self, handler: Handler) -> Handler:
        return preceded(handler, self._messages if handler.request_streaming else self._request, request_streaming=True)

    async def _request(self, _: Any, context: Context) -> Any:
        request = await _read(context, self._receive_s)
        if request is grpc.aio.EOF:
            raise InvalidArgumentError("NO_REQUEST", "the call ended without a request")
        return request

    async def _messages(self, _: Any, context: Context) -> AsyncIterator[Any]:
        return _Messages(context, self._receive_s)


class _Messages(AsyncIterator[Any]):
    """A client's messages; the first in time."""

    def __init__(self, context: Context, receive_s: float) -> None:
        self._context = context
        self._limit_s: float | None = receive_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        limit_s, self._limit_s = self._limit_s, None
        message = await _read(self._context, limit_s)
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


async def _read(context: Context, limit_s: float | None) -> Any:
    """Returns the next message, or EOF. Raises DeadlineExceededError, InvalidArgumentError."""
    try:
        async with asyncio.timeout(limit_s):
            return await context.read()
    except TimeoutError:
        raise DeadlineExceededError("SLOW_WRITER", f"the request did not come within {limit_s:g} s") from None
    except DecodeError:
        raise InvalidArgumentError("UNREADABLE", "the message is none of this method's") from None
