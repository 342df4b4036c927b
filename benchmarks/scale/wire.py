"""gRPC without a network: calls go from generated stub to generated handler, as bytes, in one thread.

What is left out is gRPC's own work (HTTP/2, its threads) and the interceptors: for each message the same, whatever the
size of a cluster. What a server does is paid for by its account.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self

import grpc

from backhaul_common.errors import BackhaulError
from backhaul_common.status import to_status
from benchmarks.scale.meter import Meter

_LATENCY_S = 0.0003
"""One way."""

_END = object()

_BY_TIME = frozenset({"JoinNode", "WatchLoad", "WatchNodes"})
"""Methods that are used as time passes, whatever turns there are."""


class Server:
    """What `add_..._to_server` needs."""

    def __init__(self, account: str, idle: str) -> None:
        self._account = account
        self._idle = idle
        self.handlers: dict[str, Any] = {}

    def account(self, path: str) -> str:
        """Returns who pays for a method."""
        return self._idle if path.rpartition("/")[2] in _BY_TIME else self._account

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Says the same as the other method, for other versions of gRPC."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Takes the methods of a service."""
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class Network:
    """Servers by address."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.calls: Counter[str] = Counter()
        """Calls, and for streams messages to the server, by method."""
        self.sent_bytes: Counter[str] = Counter()
        """Both ways, by method."""
        self._servers: dict[str, Server] = {}

    def serve(self, address: str, account: str, *, idle: str) -> Server:
        """Returns a new server at an address. ``idle`` pays for what goes by time and not by turns."""
        server = self._servers[address] = Server(account, idle)
        return server

    def connect(self, address: str) -> "Channel":
        """Opens a channel."""
        return Channel(self, self._servers[address])

    def note(self, path: str, payload: bytes, *, call: bool = False) -> bytes:
        """Counts what is sent."""
        name = path.rpartition("/")[2]
        self.calls[name] += call
        self.sent_bytes[name] += len(payload)
        return payload


class Channel:
    """What generated stubs need of a channel."""

    def __init__(self, network: Network, server: Server) -> None:
        self._network = network
        self._server = server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Nothing is open."""

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        """Returns the method."""

        async def call(request: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109  # it is gRPC's name
            network, handler = self._network, self._server.handlers[path]
            payload = network.note(path, request_serializer(request), call=True)
            async with asyncio.timeout(timeout):
                await asyncio.sleep(_LATENCY_S)
                answer = await network.meter.within(self._server.account(path), _answered(handler, payload, timeout))
                await asyncio.sleep(_LATENCY_S)
            return response_deserializer(network.note(path, answer))

        return call

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., "Call"]:
        """Returns the method."""

        def call(request: Any) -> Call:
            made = Call(self._network, self._server, path, request_serializer, response_deserializer)
            made.send(request)
            return made

        return call

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., "Call"]:
        """Returns the method."""
        return lambda: Call(self._network, self._server, path, request_serializer, response_deserializer)


class Call:
    """A call of which messages come one by one."""

    def __init__(self, network: Network, server: Server, path: str, to_bytes: Any, from_bytes: Any) -> None:
        self._network = network
        self._path = path
        self._to_bytes = to_bytes
        self._from_bytes = from_bytes
        # Clients wait for answers, and agents send four batches at most before they do.
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        with network.meter.paying(server.account(path)):
            self._task = asyncio.ensure_future(self._run(server.handlers[path]))

    def send(self, request: Any) -> None:
        """Sends one message."""
        self._requests.put_nowait(self._network.note(self._path, self._to_bytes(request), call=True))

    async def write(self, request: Any) -> None:
        """Sends one message."""
        self.send(request)

    async def done_writing(self) -> None:
        """Says that there is nothing more."""
        self._requests.put_nowait(_END)

    async def read(self) -> Any:
        """Returns the next message; at the end of the stream something else."""
        answer = await self._answers.get()
        if answer is _END:
            return grpc.aio.EOF
        if isinstance(answer, BaseException):
            raise _as_rpc_error(answer)
        return self._from_bytes(answer)

    def cancel(self) -> bool:
        """Ends the call."""
        return self._task.cancel()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls back when it has ended."""
        self._task.add_done_callback(callback)

    async def code(self) -> grpc.StatusCode:
        """Returns how it ended."""
        await asyncio.wait([self._task])
        return grpc.StatusCode.OK

    async def _run(self, handler: Any) -> None:
        kind = ("stream" if handler.request_streaming else "unary") + "_stream"
        given: Any = self._taken(handler) if handler.request_streaming else await anext(self._taken(handler))
        try:
            work = getattr(handler, kind)(given, _Context(self, handler))
            if isinstance(work, Coroutine):
                await work
            else:
                async for message in work:
                    self.answer(handler.response_serializer(message))
        except Exception as error:  # noqa: BLE001  # the border of the call: its client is told
            self._answers.put_nowait(error)
        else:
            self._answers.put_nowait(_END)

    async def _taken(self, handler: Any) -> AsyncIterator[Any]:
        while (payload := await self._requests.get()) is not _END:
            yield handler.request_deserializer(payload)

    def answer(self, payload: bytes) -> None:
        """Sends one message back."""
        self._answers.put_nowait(self._network.note(self._path, payload))


class _Context:
    """What handlers need of theirs."""

    def __init__(self, call: Call | None, handler: Any, timeout_s: float | None = None) -> None:
        self._call = call
        self._handler = handler
        self._timeout_s = timeout_s

    async def write(self, message: Any) -> None:
        assert self._call is not None
        self._call.answer(self._handler.response_serializer(message))

    def time_remaining(self) -> float | None:
        return self._timeout_s

    def cancelled(self) -> bool:
        return False


async def _answered(handler: Any, payload: bytes, timeout_s: float | None) -> bytes:
    try:
        answer = await handler.unary_unary(handler.request_deserializer(payload), _Context(None, handler, timeout_s))
    except BackhaulError as error:
        raise _as_rpc_error(error) from error
    result: bytes = handler.response_serializer(answer)
    return result


def _as_rpc_error(error: BaseException) -> BaseException:
    if not isinstance(error, BackhaulError):
        return error
    status = to_status(error)
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)
