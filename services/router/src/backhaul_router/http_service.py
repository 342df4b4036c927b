"""The OpenAI HTTP API."""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Self
from urllib.parse import unquote_to_bytes

import msgspec
import structlog
from aiohttp import web

from backhaul_common.tls import Identity
from backhaul_router.admission import Admission, Held
from backhaul_router.answers import with_error_event
from backhaul_router.conversations import Conversations, Ending, deleted_document
from backhaul_router.core.body import Endpoint
from backhaul_router.core.errors import ApiError, invalid
from backhaul_router.core.passing import PASSED, RESPONSES
from backhaul_router.http_listener import Listener, listen
from backhaul_router.http_protocol import ApiProtocol, ApiServer, BodyCutError, ClientLimits, Phase
from backhaul_router.models import Models
from backhaul_router.passing import PassedAnswer, Passing
from backhaul_router.ports import Answer
from backhaul_router.readiness import Readiness
from backhaul_router.request_headers import STREAM_HEADERS, authorization_in, left_s, request_id_in, turn_request
from backhaul_router.turns import Turns

_END_S = 0.1
"""Given to connections for their last bytes, seconds; aiohttp takes 0 for no limit."""

_FIRST_REQUEST_S = 0.2
"""Given to clients that have just connected when the port closes, seconds."""
_LOOK_S = 0.02
"""Between two looks at what still runs, seconds."""

_PIECE_BYTES = 64 * 1024
_CONVERSATIONS = "/v1/conversations/"

_Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]


class HttpService:
    """Serves the API on one address. Enter it inside the event loop that uses it; leaving stops it without grace."""

    def __init__(
        self,
        *,
        address: str,
        turns: Turns,
        conversations: Conversations,
        models: Models,
        passing: Passing,
        readiness: Readiness,
        admission: Admission,
        limits: ClientLimits,
        tls: Identity | None = None,
    ) -> None:
        self._address = address
        self._turns = turns
        self._conversations = conversations
        self._models = models
        self._passing = passing
        self._readiness = readiness
        self._admission = admission
        self._limits = limits
        self._tls = tls
        self._routes: dict[str, tuple[str, _Handler]] = {
            "/v1/models": ("GET", self._list_models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            **{endpoint.value: ("POST", self._turn) for endpoint in Endpoint},
            **dict.fromkeys(PASSED, ("POST", self._pass_on)),
        }
        self._running: set[asyncio.Task[object]] = set()
        self._api: ApiServer | None = None
        self._listener: Listener | None = None
        self._leaving = False
        self.port = 0
        """Port that the server listens on; known once entered."""

    async def __aenter__(self) -> Self:
        """Binds and starts. Raises UnavailableError (ADDRESS_UNAVAILABLE) when the address cannot be bound."""
        self._api = ApiServer(self._handle, limits=self._limits)
        self._listener = await listen(self._api, self._address, self._tls)
        self.port = self._listener.port
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop(0)

    def leave(self) -> None:
        """Asks clients, with each answer from now on, to connect anew for the next one."""
        self._leaving = True

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, waits up to ``grace_s`` seconds for running requests, ends the rest."""
        if self._listener is None or self._api is None:
            return
        self.leave()
        await self._listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._finish(self._api)
        self._api.end_goodbyes()
        await self._api.shutdown(_END_S)
        self._listener = None

    async def _finish(self, api: ApiServer) -> None:
        """Waits for running requests, and those that clients are about to send; their answers say that it was the last.

        A request that meets a connection being closed is lost, and its client cannot know whether it was taken.
        """
        await asyncio.sleep(_FIRST_REQUEST_S)
        while api.close_idle() or self._running:  # noqa: ASYNC110  # unread bytes are no event of the loop
            await asyncio.sleep(_LOOK_S)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        _enter(request, Phase.WAITING)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        request_id = request_id_in(request.headers)
        unbound = structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            return await self._answered(request, request_id)
        finally:
            structlog.contextvars.reset_contextvars(**unbound)
            self._running.discard(task)

    async def _answered(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        try:
            return await self._dispatch(request, request_id)
        except ApiError as error:
            body = error.body_at(request.path)
            response = self._json(request, error.status, body, {**error.headers, "x-request-id": request_id})
            if error.status == 408 and isinstance(request.protocol, ApiProtocol):
                request.protocol.hang_up()
                response.force_close()
            return response

    async def _dispatch(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        method, handler = self._route(request.path)
        if handler is None:
            raise ApiError(404, f"there is no {_printable(request.path)} here, and it is not passed on to an engine")
        if request.method != method:
            raise ApiError(405, f"use {method}", headers={"allow": method})
        return await handler(request, request_id)

    def _route(self, path: str) -> tuple[str, _Handler | None]:
        if path.startswith(_CONVERSATIONS) and path != _CONVERSATIONS:
            return "DELETE", self._end_conversation
        if path.startswith(RESPONSES) and "/" not in path.removeprefix(RESPONSES):
            return "GET", self._response
        return self._routes.get(path, ("", None))

    async def _turn(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        self._check_head(request)
        headers = request.headers
        tenant = self._turns.authenticate(authorization_in(headers, request.path))
        async with self._admission.turn(tenant, left_s=left_s(headers)) as held:
            turn = turn_request(Endpoint(request.path), headers, await self._body(request, held), tenant)
            async with self._turns.run(turn) as answer:
                send = self._stream if answer.body is None else self._whole
                return await send(request, answer, request_id)

    def _check_head(self, request: web.BaseRequest) -> None:
        if request.content_type != "application/json" or "content-type" not in request.headers:
            raise ApiError(415, "the content type must be application/json")
        if (request.content_length or 0) > self._limits.body_bytes:
            raise self._too_large()

    async def _pass_on(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        self._check_head(request)
        authorization = authorization_in(request.headers, request.path)
        tenant = self._turns.authenticate(authorization)
        async with self._admission.turn(tenant, left_s=left_s(request.headers)) as held:
            body = await self._body(request, held)
            to_engine = {**self._turns.engine_headers(authorization), "x-request-id": uuid.uuid4().hex}
            answer = await self._passing.ask(request.path, body, tenant=tenant, headers=to_engine)
            return await self._whole(request, answer, request_id)

    async def _response(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        if request.query:
            raise invalid("responses are not streamed again: there must be no query")
        authorization = request.headers.get("authorization")
        tenant = self._turns.authenticate(authorization)
        async with self._admission.turn(tenant, left_s=left_s(request.headers)):
            to_engine = self._turns.engine_headers(authorization)
            name = request.path.removeprefix(RESPONSES)
            answer = await self._passing.response(name, tenant=tenant, headers=to_engine)
            return await self._whole(request, answer, request_id)

    async def _body(self, request: web.BaseRequest, held: Held) -> bytes:
        """Reads the whole body.

        Raises ApiError: 400 when it cannot be decoded, 408 when it takes too long, 413, 429.
        """
        # Not a list: pieces of a few bytes would take many times their own size.
        body = bytearray()
        # What is there already, as most bodies are, needs no timer.
        limit_s = None if request.content.is_eof() else self._limits.receive_s
        try:
            async with asyncio.timeout(limit_s):
                await _ask_for_body(request)
                async for piece in request.content.iter_any():
                    if held.byte_count + len(piece) > self._limits.body_bytes:
                        raise self._too_large()
                    held.grow(len(piece))
                    body += piece
        except BodyCutError as error:
            raise ApiError(400, "the body ended before its announced length") from error
        except web.RequestPayloadError as error:
            raise ApiError(400, "the body is not encoded as its headers say") from error
        except TimeoutError as error:
            raise ApiError(408, f"the body took more than {self._limits.receive_s:g} s") from error
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limits.body_bytes} bytes, which is this router's limit")

    async def _list_models(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        authorization = request.headers.get("authorization")
        self._turns.authenticate(authorization)
        with self._admission.listing():
            document = await self._models.document(self._turns.engine_headers(authorization))
        return self._json(request, 200, document, {"x-request-id": request_id})

    async def _end_conversation(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        # Headers may hold any bytes; a path that was decoded to text would keep those that are no UTF-8 encoded.
        path = unquote_to_bytes(request.rel_url.raw_path)
        options = _query(request, "model", "cache_salt")
        ending = Ending(
            session_id=path.removeprefix(_CONVERSATIONS.encode()),
            model=options.get("model", ""),
            cache_salt=options.get("cache_salt", ""),
            authorization=request.headers.get("authorization"),
        )
        with self._admission.ending():
            ended = await self._conversations.end(ending)
        document = deleted_document(request.path.removeprefix(_CONVERSATIONS), ended)
        return self._json(request, 200, document, {"x-request-id": request_id})

    async def _health(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return self._json(request, 200, b'{"status":"alive"}', {"x-request-id": request_id})

    async def _ready(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        problem = self._readiness.problem()
        document = msgspec.json.encode({"ready": not problem, "reason": problem})
        return self._json(request, 503 if problem else 200, document, {"x-request-id": request_id})

    async def _whole(
        self, request: web.BaseRequest, answer: Answer | PassedAnswer, request_id: str
    ) -> web.StreamResponse:
        """Sends in pieces: a slow client must not make a large answer pile up behind its connection."""
        body = memoryview(answer.body or b"")
        headers = {"content-type": "application/json", **answer.headers, "content-length": str(len(body))}
        response = await self._begin(request, answer.status, {**headers, "x-request-id": request_id})
        for start in range(0, len(body), _PIECE_BYTES):
            await response.write(body[start : start + _PIECE_BYTES])
        await response.write_eof()
        return response

    async def _stream(self, request: web.BaseRequest, answer: Answer, request_id: str) -> web.StreamResponse:
        assert answer.stream is not None
        headers = {**answer.headers, **STREAM_HEADERS, "x-request-id": request_id}
        response = await self._begin(request, answer.status, headers)
        async with aclosing(with_error_event(answer.stream, request.path)) as chunks:
            async for chunk in chunks:
                await response.write(chunk)
                # The head has gone with the first piece, which is there already.
                _enter(request, Phase.STREAMING)
        _enter(request, Phase.ANSWERING)
        await response.write_eof()
        return response

    async def _begin(self, request: web.BaseRequest, status: int, headers: Mapping[str, str]) -> web.StreamResponse:
        response = _Response(status=status, headers=headers)
        self._maybe_last(response)
        _enter(request, Phase.ANSWERING)
        await response.prepare(request)
        return response

    def _json(
        self, request: web.BaseRequest, status: int, body: bytes, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        _enter(request, Phase.ANSWERING)
        response = web.Response(status=status, body=body, headers={"content-type": "application/json", **headers})
        self._maybe_last(response)
        return response

    def _maybe_last(self, response: web.StreamResponse) -> None:
        if self._leaving:
            response.force_close()


class _Response(web.StreamResponse):
    """Sends its head with the first piece of its body, as aiohttp does for bodies that it has whole."""

    _send_headers_immediately = False


async def _ask_for_body(request: web.BaseRequest) -> None:
    """Clients with large bodies wait for this, some of them without limit."""
    if request.version >= (1, 1) and request.headers.get("expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


def _enter(request: web.BaseRequest, phase: Phase) -> None:
    if isinstance(request.protocol, ApiProtocol):
        request.protocol.enter(phase)


def _query(request: web.BaseRequest, *names: str) -> dict[str, str]:
    """Returns the query's parameters. Raises ApiError (400) for one that has another name or comes twice."""
    for name in request.query:
        if name not in names or len(request.query.getall(name)) > 1:
            raise invalid(f"the query may hold each of {', '.join(names)} once", param=name)
    return dict(request.query)


def _printable(path: str) -> str:
    return path[:100] if path.isascii() and path.isprintable() else "such path"
