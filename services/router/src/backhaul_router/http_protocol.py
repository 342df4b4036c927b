"""HTTP/1.1 server protocol: errors in OpenAI's form, limits on clients, and clients that close only one side."""

import asyncio
import select
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import aiohttp
from aiohttp import web, web_protocol
from aiohttp.http_exceptions import LineTooLong, PayloadEncodingError

from backhaul_common.metering import Counter
from backhaul_router import instruments
from backhaul_router.core.errors import ApiError


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client may ask of the server."""

    body_bytes: int
    """Largest body of a request."""
    receive_s: float
    """Time for sending a request's head, and again for its body."""
    send_s: float
    """Time in which a client has to take what waits for it (some 100 KiB)."""
    connections: int
    """Open connections of all clients together."""
    goodbyes: int
    """Those that were refused and stay open for a moment; the oldest of more closes at once."""


class Phase(Enum):
    """What a connection is doing; the value is what a client that may be gone can be sent without harm."""

    WAITING = b"HTTP/1.1 102 Processing\r\n\r\n"
    """No part of the answer has been sent: an interim response."""
    ANSWERING = b""
    """Head or end of the answer are being written: nothing."""
    STREAMING = b"0"
    """Between two chunks: a leading zero of the next chunk's size."""


_PROBE_S = 0.3
_MAX_STREAM_PROBES = 3
"""Parsers bound the digits of a chunk's size; each event of the stream tells as much as a probe."""
_GOODBYE_S = 1.0
"""How long a connection that gets no service stays open for its client to read why."""


class BodyCutError(web.RequestPayloadError):
    """The client closed its sending side in the middle of a body."""


class ApiProtocol(web.RequestHandler):
    """One connection.

    A client that has closed its sending side may still be reading, or be gone: TCP does not tell, until something is
    sent. So such a client is sent bytes that mean nothing. One that is gone resets the connection, which cancels the
    handler. (aiohttp's own protocol lets asyncio close the connection at once.)

    A client that sends its request too slowly, or takes its answer too slowly, loses the connection.
    """

    __slots__ = (
        "_body",
        "_head_timer",
        "_limits",
        "_phase",
        "_probe",
        "_send_timer",
        "_served",
        "_server",
        "_stream_probes",
    )

    def __init__(self, server: "ApiServer", limits: ClientLimits, **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._server = server
        self._limits = limits
        self._phase = Phase.WAITING
        self._body: aiohttp.StreamReader | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._stream_probes = 0
        self._served = False

    @property
    def idle(self) -> bool:
        """Whether the connection is open and no request is running or waiting."""
        # _waiter is aiohttp's idle mark (web_protocol.py, _process_keepalive); no public one exists.
        waiting = self._waiter is not None and not self._waiter.done()
        return self.transport is not None and (waiting or not self._request_count)

    @property
    def _encrypted(self) -> bool:
        """Whether there is no closing of one side: asyncio ends both (sslproto.py, `_do_read__eof_received`)."""
        return self.transport is not None and _encrypted(self.transport)

    def begin(self, body: aiohttp.StreamReader) -> None:
        """The next request's turn has come."""
        self._body = body

    def enter(self, phase: Phase) -> None:
        """The handler says what comes next on the wire."""
        self._phase = phase

    def hang_up(self) -> None:
        """After the answer, does not wait for the rest of a slow request (aiohttp does for 10 s: web_protocol.py)."""
        self._lingering_time = 0.0
        self._server.count_drop("slow_request")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to serve, unless too many connections are open and none of them is idle."""
        transport = cast("asyncio.Transport", transport)
        self._served = self._server.make_room()
        if self._served:
            # Whatever waits for the client is waited for: a transport that closes keeps its socket until all is taken.
            # Under TLS asyncio takes none at all for too much, too (sslproto.py, `_control_app_writing`): not below 1.
            transport.set_write_buffer_limits(high=int(_encrypted(transport)))
            super().connection_made(transport)
            return
        error = ApiError(429, f"{self._limits.connections} connections are open, which is this router's limit")
        self._server.say_goodbye(transport, error)

    def data_received(self, data: bytes) -> None:
        """Parses; begins to count time when a head is left unfinished."""
        if not self._served:
            return
        super().data_received(data)
        self._end_broken_body()
        if not self.idle:
            _cancel(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None and data.strip(b"\r\n"):
            self._head_timer = self._later(self._limits.receive_s, self._give_up_reading)

    def pause_writing(self) -> None:
        """The client does not take what was sent: begins to count time."""
        super().pause_writing()
        if self.transport is not None:
            self._send_timer = self._later(self._limits.send_s, partial(self._give_up_writing, self.transport))

    def resume_writing(self) -> None:
        """It does."""
        _cancel(self._send_timer)
        self._send_timer = None
        super().resume_writing()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio allows the answer, aiohttp has none
        """Keeps the connection for a request that is running; closes it otherwise. A body that lacks bytes ends."""
        if self.idle or self._encrypted:
            return None
        self.close()
        body = self._last_body()
        if body is None or body.is_eof():
            self._send_probe()
        else:
            body.set_exception(BodyCutError("the client sends no more"))
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the handler too (`handler_cancellation`)."""
        for timer in (self._probe, self._head_timer, self._send_timer):
            _cancel(timer)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Logs, unless a client sent a body that cannot be read: aiohttp reads what handlers have left of it."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError | PayloadEncodingError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that could not be parsed, or whose handler failed. Re-raises the loss of the client."""
        if isinstance(exc, ConnectionError):
            raise exc
        if status >= 500:
            self.log_exception("request failed", exc_info=exc)
        error = ApiError(status, "bad HTTP request" if status < 500 else "internal error")
        if isinstance(exc, LineTooLong):
            error = ApiError(431, f"the request line or a header is longer than {self.max_field_size} bytes")
        response = web.Response(status=error.status, body=error.body, content_type="application/json")
        response.force_close()
        return response

    def _end_broken_body(self) -> None:
        """Ends a body whose chunks cannot be read, and the connection with it.

        aiohttp takes them for a bad request that follows (web_protocol.py, ``data_received``), and lets the handler
        wait for the rest.
        """
        if not self._messages or not isinstance(self._messages[-1][0], web_protocol._ErrInfo):
            return
        body = self._messages[-2][1] if len(self._messages) > 1 else self._body
        if body is not None and not body.is_eof():
            self._messages.pop()
            body.set_exception(web.RequestPayloadError("the chunks of the body cannot be read"))
            self.close()

    def _last_body(self) -> aiohttp.StreamReader | None:
        """Returns the body of the last request that has begun to arrive."""
        return self._messages[-1][1] if self._messages else self._body

    def _give_up_reading(self) -> None:
        self._head_timer = None
        # aiohttp forgets the transport in force_close.
        transport = self.transport
        if transport is None or not self.idle:
            return
        self._server.count_drop("slow_request")
        self.close()
        error = ApiError(408, f"the request's head took more than {self._limits.receive_s:g} s")
        self._server.say_goodbye(transport, error)

    def _give_up_writing(self, transport: asyncio.Transport) -> None:
        # aiohttp forgets the transport in force_close.
        self._send_timer = None
        self._server.count_drop("slow_reader")
        transport.abort()

    def _send_probe(self) -> None:
        request = self._current_request
        if self.transport is None or (request is not None and request.version < (1, 1)):
            return
        if self._phase is Phase.STREAMING:
            self._stream_probes += 1
        if self._stream_probes <= _MAX_STREAM_PROBES:
            self.transport.write(self._phase.value)
            self._probe = self._later(_PROBE_S, self._send_probe)

    def _later(self, seconds: float, then: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, then)


class ApiServer(web.Server):
    """Makes the protocols; cancels handlers whose client is gone."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], *, limits: ClientLimits
    ) -> None:
        super().__init__(
            handler,
            request_factory=self._request,
            handler_cancellation=True,
        )
        self._limits = limits
        self._own_loop = asyncio.get_running_loop()
        self._goodbyes: dict[asyncio.Transport, None] = {}
        self._drops = Counter(instruments.DROPPED_CONNECTIONS)

    def __call__(self) -> web.RequestHandler:
        """Makes the protocol of a new connection."""
        return ApiProtocol(self, self._limits, loop=self._own_loop, access_log=None)

    def make_room(self) -> bool:
        """Tells whether one more connection may be served; closes the oldest idle one if it must."""
        if len(self._connections) < self._limits.connections:
            return True
        idle = next((each for each in self._connections if _is_idle(each) and not _readable([each])), None)
        self.count_drop("too_many" if idle is None else "idle")
        if idle is not None:
            idle.force_close()
        return idle is not None

    def count_drop(self, reason: str) -> None:
        """Counts a connection that is ended by a limit."""
        self._drops.add(1, reason)

    def say_goodbye(self, transport: asyncio.Transport, error: ApiError) -> None:
        """Sends an error and closes a moment later: a client that is still sending would fail before it reads why."""
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        rest = f"content-length: {len(error.body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
        transport.write((head + rest).encode() + error.body)
        if transport.can_write_eof():
            transport.write_eof()
        if len(self._goodbyes) >= self._limits.goodbyes:
            self._part(next(iter(self._goodbyes), transport))
        self._goodbyes[transport] = None
        self._own_loop.call_later(_GOODBYE_S, self._part, transport)

    def _part(self, transport: asyncio.Transport) -> None:
        self._goodbyes.pop(transport, None)
        transport.abort()

    def end_goodbyes(self) -> None:
        """Closes at once what would have been closed a moment later."""
        for transport in tuple(self._goodbyes):
            self._part(transport)

    def close_idle(self) -> bool:
        """Closes idle connections, but for those on which a client has sent what has yet to be read: are there any?

        aiohttp's own `pre_shutdown` ends the task of an idle connection, but leaves its socket open and deaf.
        """
        idle = [connection for connection in self.connections if _is_idle(connection)]
        asking = _readable(idle)
        for connection in idle:
            if connection not in asking:
                connection.force_close()
        return bool(asking)

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        protocol.begin(payload)
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._own_loop, client_max_size=self._limits.body_bytes
        )


def _is_idle(connection: web.RequestHandler) -> bool:
    return isinstance(connection, ApiProtocol) and connection.idle


def _readable(connections: Sequence[web.RequestHandler]) -> set[web.RequestHandler]:
    """Returns the connections whose sockets hold what the event loop has yet to read."""
    places = {
        connection.transport.get_extra_info("socket").fileno(): connection
        for connection in connections
        if connection.transport is not None
    }
    look = select.poll()
    for place in places:
        look.register(place, select.POLLIN)
    return {places[place] for place, _ in look.poll(0)}


def _encrypted(transport: asyncio.BaseTransport) -> bool:
    return transport.get_extra_info("sslcontext") is not None


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
