"""HTTP/1.1 server protocol: errors in OpenAI's form, and clients that close only their sending side."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

from aiohttp import web

from backhaul_router.core.errors import ApiError


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


class ApiProtocol(web.RequestHandler):
    """One connection.

    A client that has closed its sending side may still be reading, or be gone: TCP does not tell, until something is
    sent. So such a client is sent bytes that mean nothing. One that is gone resets the connection, which cancels the
    handler. (aiohttp's own protocol lets asyncio close the connection at once.)
    """

    __slots__ = ("_phase", "_probe", "_stream_probes")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = Phase.WAITING
        self._probe: asyncio.TimerHandle | None = None
        self._stream_probes = 0

    def enter(self, phase: Phase) -> None:
        """The handler says what comes next on the wire."""
        self._phase = phase

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio allows the answer, aiohttp has none
        """Keeps the connection for a request that is running; closes it otherwise."""
        # _waiter is aiohttp's idle mark (web_protocol.py, _process_keepalive); no public one exists.
        idle = self._waiter is not None and not self._waiter.done()
        if idle or not self._request_count:
            return None
        self.close()
        self._send_probe()
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the handler too (`handler_cancellation`)."""
        self._cancel_probe()
        super().connection_lost(exc)

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
        response = web.Response(status=status, body=error.body, content_type="application/json")
        response.force_close()
        return response

    def _send_probe(self) -> None:
        request = self._current_request
        if self.transport is None or (request is not None and request.version < (1, 1)):
            return
        if self._phase is Phase.STREAMING:
            self._stream_probes += 1
        if self._stream_probes <= _MAX_STREAM_PROBES:
            self.transport.write(self._phase.value)
            self._probe = asyncio.get_running_loop().call_later(_PROBE_S, self._send_probe)

    def _cancel_probe(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None


class ApiServer(web.Server):
    """Makes the protocols; cancels handlers whose client is gone."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], *, body_limit_bytes: int
    ) -> None:
        super().__init__(
            handler,
            request_factory=self._request,
            handler_cancellation=True,
        )
        self._body_limit_bytes = body_limit_bytes
        self._own_loop = asyncio.get_running_loop()

    def __call__(self) -> web.RequestHandler:
        """Makes the protocol of a new connection."""
        return ApiProtocol(self, loop=self._own_loop, access_log=None)

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, protocol, writer, task, self._own_loop, client_max_size=self._body_limit_bytes
        )
