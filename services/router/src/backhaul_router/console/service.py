"""The console's own HTTP listener: the page for everybody who reaches it, its data for operators."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog
from aiohttp import web

from backhaul_common.addresses import loopback
from backhaul_common.clock import Clock
from backhaul_common.tls import Identity
from backhaul_router.console.conversations import ConversationReader, Question
from backhaul_router.console.page_files import HEADERS, page_files
from backhaul_router.console.state import ConsoleState, Cursor
from backhaul_router.core.console.operators import Operators
from backhaul_router.core.errors import ApiError, invalid
from backhaul_router.http_listener import Listener, listen
from backhaul_router.http_protocol import ApiProtocol, ApiServer, BodyCutError, ClientLimits, Phase

_log = structlog.get_logger(__name__)

PREFIX = "/console/"
_API = PREFIX + "api/"

MAX_ONLOOKERS = 16
"""Streams at once; more are refused with 429."""

_MAX_QUESTIONS = 4
"""Conversations that are looked up at once; more are refused with 429."""

_BODY_BYTES = 8 * 1024
_LIMITS = ClientLimits(body_bytes=_BODY_BYTES, receive_s=10.0, send_s=20.0, connections=128, goodbyes=16)
_END_S = 0.1

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ConsoleService:
    """Serves the console on one address. Enter it inside the event loop that uses it; leaving ends all streams."""

    def __init__(
        self,
        *,
        address: str,
        state: ConsoleState,
        conversations: ConversationReader,
        operators: Operators,
        clock: Clock,
        tls: Identity | None = None,
    ) -> None:
        self._address = address
        self._state = state
        self._conversations = conversations
        self._operators = operators
        self._clock = clock
        self._tls = tls
        self._files = page_files()
        self._routes: dict[str, tuple[str, _Handler]] = {
            "state": ("GET", self._whole),
            "events": ("GET", self._events),
            "conversation": ("POST", self._conversation),
        }
        self._streams: set[asyncio.Task[Any]] = set()
        self._questions = 0
        self._sampling: asyncio.Task[None] | None = None
        self._api: ApiServer | None = None
        self._listener: Listener | None = None
        self.port = 0
        """Port that it listens on; known once entered."""

    async def __aenter__(self) -> Self:
        """Binds and starts. Raises UnavailableError (ADDRESS_UNAVAILABLE) when the address cannot be bound."""
        self._api = ApiServer(self._handle, limits=_LIMITS)
        self._listener = await listen(self._api, self._address, self._tls)
        self.port = self._listener.port
        self._sampling = asyncio.create_task(self._state.run())
        scheme = "https" if self._tls else "http"
        host = self._address.rpartition(":")[0]
        _log.info("console", url=f"{scheme}://{host}:{self.port}{PREFIX}", key_wanted=bool(self._operators.digests))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._listener is None or self._api is None:
            return
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.wait([self._sampling])
        await self._listener.close()
        await self._end_streams()
        self._api.close_idle()
        self._api.end_goodbyes()
        await self._api.shutdown(_END_S)
        self._listener = None

    async def _end_streams(self) -> None:
        """Ends them before aiohttp does, which may log an error for a client that leaves just then."""
        for stream in self._streams:
            stream.cancel()
        if self._streams:
            await asyncio.wait(self._streams)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._dispatch(request)
        except ApiError as error:
            return _answer(request, error.status, error.body, "application/json", error.headers)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        self._check_host(request)
        path = request.path
        if path in ("/", PREFIX.rstrip("/")):
            _check_method(request, "GET")
            return _answer(request, 302, b"", "text/plain", {"location": PREFIX})
        if path.startswith(_API):
            self._operators.check(request.headers.get("authorization"))
            method, handler = self._route(path.removeprefix(_API))
            _check_method(request, method)
            return await handler(request)
        file = self._files.get(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None
        if file is None:
            raise ApiError(404, f"there is nothing here but {PREFIX}")
        _check_method(request, "GET")
        return _answer(request, 200, file.body, file.content_type)

    def _route(self, name: str) -> tuple[str, _Handler]:
        kind, _, number = name.partition("/")
        if kind == "turns" and number.isascii() and number.isdecimal() and len(number) < 16:
            return "GET", lambda request: self._turn(request, int(number))
        if name not in self._routes:
            raise ApiError(404, "there is no such data: see docs/console.md")
        return self._routes[name]

    def _check_host(self, request: web.BaseRequest) -> None:
        """Without keys, pages of other sites must not read along: a name of theirs may lead to this machine, too."""
        if self._operators.digests:
            return
        try:
            local = loopback(_with_port(request.host))
        except ValueError:
            local = False
        if not local:
            raise ApiError(403, "without console_key_file the console is for this machine: call it localhost")

    async def _whole(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json(request, self._state.whole(Cursor()))

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        """Streams everything, then with each tick what has changed. A slow client misses what is between."""
        if len(self._streams) >= MAX_ONLOOKERS:
            raise ApiError(429, f"{MAX_ONLOOKERS} pages look on, which is the limit", headers={"retry-after": "5"})
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            return await self._stream(request)
        finally:
            self._streams.discard(task)

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = {**HEADERS, "content-type": "text/event-stream", "x-accel-buffering": "no"}
        response = web.StreamResponse(status=200, headers=headers)
        _enter(request, Phase.ANSWERING)
        await response.prepare(request)
        _enter(request, Phase.STREAMING)
        cursor = Cursor()
        await response.write(_event("state", self._state.whole(cursor)))
        while True:
            await self._clock.sleep(self._state.tick_s)
            await response.write(_event("changes", self._state.changes(cursor)))

    async def _turn(self, request: web.BaseRequest, number: int) -> web.StreamResponse:
        return _json(request, await self._asked(lambda: self._conversations.of_turn(number)))

    async def _conversation(self, request: web.BaseRequest) -> web.StreamResponse:
        question = _question(await _body(request))
        return _json(request, await self._asked(lambda: self._conversations.by_id(question)))

    async def _asked(self, look_up: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        if self._questions >= _MAX_QUESTIONS:
            raise ApiError(429, "too many conversations are being looked up", headers={"retry-after": "1"})
        self._questions += 1
        try:
            return await look_up()
        finally:
            self._questions -= 1


def _with_port(host: str) -> str:
    return host if ":" in host.rpartition("]")[2] else f"{host}:80"


def _check_method(request: web.BaseRequest, method: str) -> None:
    if request.method != method:
        raise ApiError(405, f"use {method}", headers={"allow": method})


async def _body(request: web.BaseRequest) -> bytes:
    """Reads a small body. Raises ApiError: 400, 408, 413, 415."""
    if request.content_type != "application/json" or "content-type" not in request.headers:
        raise ApiError(415, "the content type must be application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(_LIMITS.receive_s):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > _BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {_BODY_BYTES} bytes")
    except (BodyCutError, web.RequestPayloadError) as error:
        raise ApiError(400, "the body cannot be read") from error
    except TimeoutError as error:
        raise ApiError(408, f"the body took more than {_LIMITS.receive_s:g} s") from error
    return bytes(body)


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    model: str = ""
    tenant: str = ""
    cache_salt: str = ""


def _question(body: bytes) -> Question:
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # The message of the error may repeat what was sent.
        raise invalid("the body must be a JSON object with id, and maybe model, tenant and cache_salt") from error
    return Question(asked.id, asked.model, asked.tenant, asked.cache_salt)


def _event(name: str, document: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(document) + b"\n\n"


def _json(request: web.BaseRequest, document: dict[str, Any]) -> web.StreamResponse:
    return _answer(request, 200, msgspec.json.encode(document), "application/json")


def _answer(
    request: web.BaseRequest, status: int, body: bytes, content_type: str, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    _enter(request, Phase.ANSWERING)
    return web.Response(status=status, body=body, headers={**HEADERS, "content-type": content_type, **(headers or {})})


def _enter(request: web.BaseRequest, phase: Phase) -> None:
    if isinstance(request.protocol, ApiProtocol):
        request.protocol.enter(phase)
