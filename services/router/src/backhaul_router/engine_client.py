"""HTTP to the engines."""

import asyncio
import contextlib
import io
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from backhaul_common.tls import CallerContext
from backhaul_router.core.engine_lists import models_in, tokens_in
from backhaul_router.core.engines import EngineError, Failure, Reply
from backhaul_router.core.errors import engine_answer, too_large
from backhaul_router.core.opening import Opening, opening_of
from backhaul_router.core.sse import is_events
from backhaul_router.late_replies import LateReplies
from backhaul_router.patience import Patience

KEEP_ALIVE_S = 4.0
"""Idle connections are closed before the engine does it: vLLM's server waits 5 s (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`)."""

_OPENING_S = 0.1
"""How long a stream that says nothing but who speaks is waited for: in vLLM the rest follows at once."""

_TOKENIZE_TIMEOUT_S = 1.0
_MODELS_TIMEOUT_S = 2.0
_HEALTH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Limits, seconds. There is none on the whole of a decode leg."""

    connect_s: float
    prefill_s: float
    warm_prefill_s: float
    """A prefill leg with a handle: a holder that froze must not hold it for long."""
    first_byte_s: float
    idle_s: float
    """Between two pieces of a decode leg's answer."""


class EngineStream:
    """An answer of which the first piece has arrived."""

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, idle_s: float, answer_bytes: int) -> None:
        self._response = response
        self._first = first
        self._idle_s = idle_s
        self._answer_bytes = answer_bytes
        self.complete = False
        """Whether the whole body has been yielded."""

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers."""
        return self._response.headers

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the body's bytes as they come. Raises EngineError when they stop before the end."""
        connection = self._response.connection
        if connection is not None and connection.protocol is not None:
            # aiohttp would make a timer for each piece.
            connection.protocol.read_timeout = None
            connection.protocol.start_timeout()
        if self._first:
            yield self._first
        content = self._response.content
        try:
            with Patience(self._idle_s, content.set_exception, asyncio.get_running_loop()) as patience:
                while chunk := await patience.awaiting(content.readany()):
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _failed(error) from error
        self.complete = True

    async def read(self) -> bytes:
        """Returns the whole body. Raises EngineError when it stops before the end, ApiError when it is too large."""
        pieces, byte_count = [], 0
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                byte_count += len(chunk)
                if byte_count > self._answer_bytes:
                    raise too_large(self._answer_bytes)
                pieces.append(chunk)
        return b"".join(pieces)


class EngineClient:
    """Connections to all engines. Ignores proxy variables; sends every request once.

    Enter it inside the event loop that uses it.
    """

    def __init__(
        self, *, timeouts: EngineTimeouts, answer_bytes: int, late_limit: int, tls: CallerContext | None = None
    ) -> None:
        """``answer_bytes`` bounds answers that are read whole, ``late_limit`` prefill legs that nobody waits for."""
        self._timeouts = timeouts
        self._answer_bytes = answer_bytes
        self._tls = tls
        self._late = LateReplies(late_limit)
        self._session: aiohttp.ClientSession | None = None
        self._unpooled: aiohttp.ClientSession | None = None
        """Opens a connection for each request: one that is kept may be as dead as the one that just broke."""

    async def __aenter__(self) -> Self:
        # Turns are limited, each has one connection at a time, and none may have to wait for it.
        self._session = self._over(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=10))
        self._unpooled = self._over(aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=10))
        return self

    def _over(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, connect=self._timeouts.connect_s),
            headers={"accept-encoding": "identity", "content-type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._late.__aexit__(None, None, None)
        for session in (self._session, self._unpooled):
            if session is not None:
                await session.close()

    async def prefill(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        warm: bool,
        again: bool,
        on_sent: Callable[[], None],
        late: Callable[[Reply], None],
    ) -> Reply:
        """Runs a prefill leg, ``again`` on a new connection; calls ``on_sent`` when it goes out. Raises EngineError.

        Cancelling closes the connection a moment later, or at once if nothing was sent; ``late`` is called with a reply
        that comes until then.
        """
        limit = self._timeouts.warm_prefill_s if warm else self._timeouts.prefill_s
        sent = asyncio.Event()

        def note_sent() -> None:
            sent.set()
            on_sent()

        request = self._whole("POST", url, body, headers, limit, pooled=not again, on_sent=note_sent)
        return await self._late.reply(request, late, sent=sent.is_set)

    async def ask(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        """Runs a request that is no leg, within the time of a prefill leg. Raises EngineError."""
        return await self._whole(method, url, body, headers, self._timeouts.prefill_s)

    async def tokenize(self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float) -> list[int]:
        """Returns the token ids of a prompt. Raises EngineError; an empty list means that the engine refused."""
        reply = await self._whole("POST", url, body, headers, min(timeout_s, _TOKENIZE_TIMEOUT_S))
        return tokens_in(reply.body) if reply.status == 200 else []

    async def models(self, url: str, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """Returns the entries of `/v1/models`. Raises EngineError, or ApiError when the engine blames the client."""
        reply = await self._whole("GET", url, None, headers, _MODELS_TIMEOUT_S)
        if reply.failure:
            raise EngineError(reply.failure)
        if reply.status >= 400:
            raise engine_answer(reply.status, reply.body, reply.headers)
        try:
            return models_in(reply.body)
        except ValueError as error:
            raise EngineError(Failure.FAULT) from error

    async def health_failure(self, url: str) -> Failure | None:
        """Returns how a server fails to answer 200, soon; None when it does. Never raises."""
        try:
            reply = await self._whole("GET", url, None, {}, _HEALTH_TIMEOUT_S)
        except EngineError as error:
            # A time-out while connecting is one too: nobody refused.
            return Failure.TIMEOUT if isinstance(error.__cause__, TimeoutError) else error.failure
        return None if reply.status == 200 else Failure.UNAVAILABLE

    def decode(
        self, url: str, body: bytes, headers: Mapping[str, str], *, again: bool, on_sent: Callable[[], None]
    ) -> "DecodeRequest":
        """Runs a decode leg while entered; that is when something of the answer is there. Leaving early ends the leg.

        ``again`` takes a new connection; ``on_sent`` is called when the request goes out. Raises EngineError while
        entering: ABANDONED for a stream that says at its beginning that the request failed.
        """
        limits = aiohttp.ClientTimeout(
            total=None, connect=self._timeouts.connect_s, sock_read=self._timeouts.first_byte_s
        )
        request = self._open(pooled=not again).post(
            url, data=_Body(body, on_sent), headers=headers, timeout=limits, allow_redirects=False, ssl=self._ssl
        )
        return DecodeRequest(request, self._timeouts.idle_s, self._answer_bytes)

    async def _whole(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        limit_s: float,
        *,
        pooled: bool = True,
        on_sent: Callable[[], None] | None = None,
    ) -> Reply:
        try:
            async with (
                asyncio.timeout(limit_s),
                self._open(pooled=pooled).request(
                    method,
                    url,
                    data=None if body is None else _Body(body, on_sent),
                    headers=headers,
                    allow_redirects=False,
                    ssl=self._ssl,
                ) as response,
            ):
                return Reply(response.status, response.headers, await self._bounded(response))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failed(error) from error

    async def _bounded(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > self._answer_bytes:
                raise EngineError(Failure.FAULT)
        return bytes(body)

    @property
    def _ssl(self) -> ssl.SSLContext | bool:
        return self._tls.current() if self._tls else True

    def _open(self, *, pooled: bool) -> aiohttp.ClientSession:
        session = self._session if pooled else self._unpooled
        assert session is not None, "not entered"
        return session


class DecodeRequest(AbstractAsyncContextManager[EngineStream]):
    """A decode leg while it runs. Every turn has one: it does without a generator."""

    __slots__ = ("_answer_bytes", "_idle_s", "_request", "_response")

    def __init__(self, request: Awaitable[aiohttp.ClientResponse], idle_s: float, answer_bytes: int) -> None:
        self._request = request
        self._idle_s = idle_s
        self._answer_bytes = answer_bytes

    async def __aenter__(self) -> EngineStream:
        """Sends it, and waits for the beginning of the answer. Raises EngineError."""
        try:
            self._response = response = await self._request
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failed(error) from error
        try:
            return EngineStream(response, await self._first(response), self._idle_s, self._answer_bytes)
        except BaseException:
            self._end()
            raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    async def _first(self, response: aiohttp.ClientResponse) -> bytes:
        if not (200 <= response.status < 300 or 400 <= response.status < 600):
            # Nobody follows a redirection, least of all the client; other numbers are no HTTP.
            raise EngineError(Failure.FAULT)
        try:
            return await _opening(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _failed(error) from error

    def _end(self) -> None:
        """Gives the connection back to the pool only when nothing is left on it."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


async def _opening(response: aiohttp.ClientResponse) -> bytes:
    """Returns the first bytes of an answer. Raises EngineError (ABANDONED), and what aiohttp does."""
    first = await response.content.readany()
    if response.status != 200 or not is_events(response.headers):
        return first
    shown = opening_of(first)
    while shown is Opening.ACCEPTED:
        try:
            more = await response.content.readany()
        except aiohttp.ClientPayloadError as error:
            # vLLM cuts off a stream whose request failed (`responses/serving.py`, ``responses_stream_generator``).
            raise EngineError(Failure.ABANDONED) from error
        if not more:
            raise EngineError(Failure.ABANDONED)
        first += more
        shown = opening_of(first)
    if shown is Opening.UNDECIDED:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OPENING_S):
                while shown is Opening.UNDECIDED and (more := await response.content.readany()):
                    first += more
                    shown = opening_of(first)
    if shown is Opening.FAILED:
        raise EngineError(Failure.ABANDONED)
    return first


class _Body(aiohttp.payload.BytesIOPayload):
    """A request's body, sent piece by piece: one of megabytes must not hold up other turns.

    Tells when it goes out, and the head before it: aiohttp sends both at once.
    """

    def __init__(self, body: bytes, on_sent: Callable[[], None] | None) -> None:
        super().__init__(io.BytesIO(body))
        self._on_sent = on_sent

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Sends it."""
        if self._on_sent is not None:
            self._on_sent()
        await super().write_with_length(writer, content_length)


def _failed(error: Exception) -> EngineError:
    # The order matters: aiohttp's timeouts are also connection errors.
    if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
        return EngineError(Failure.REFUSED)
    if isinstance(error, TimeoutError):
        return EngineError(Failure.TIMEOUT)
    return EngineError(Failure.DISCONNECTED)
