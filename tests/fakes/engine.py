"""A small vLLM server: strict about requests as vLLM 0.32 is, with scripted misbehaviour. It simulates no KV content.

As a prefill engine it answers with kv_transfer_params and the connector's verdict; as a decode engine it streams a
fixed text. It records what it is sent and whether the connection was closed before the answer ended.
"""

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web

from backhaul_common.tls import Identity, ListenerContext
from tests.fakes.other_forms import message_events, response_events, whole_message, whole_response

Step = Callable[[web.Request, "Leg"], Awaitable[web.StreamResponse | None]]
"""Misbehaviour for one request; None goes on with the normal answer."""

_LABEL_FIELDS = {"scope", "keys"}
_PROOF_FIELDS = {"scope", "identity", "stride", "spacing", "token_count", "anchors"}
_ports = itertools.count(5600)


@dataclass
class Leg:
    """One request that the engine was sent."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    closed_early: asyncio.Event = field(default_factory=asyncio.Event)
    answered: bool = False

    @property
    def params(self) -> dict[str, Any] | None:
        """kv_transfer_params of the request."""
        params: dict[str, Any] | None = self.body.get("kv_transfer_params")
        return params


class RefusedError(Exception):
    """What vLLM would answer with an error."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class FakeEngine:
    """One server; an async context manager."""

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        *,
        models: Sequence[str] = ("tiny",),
        engine_id: str = "",
        connector: bool = True,
        api_key: str = "",
        text: Sequence[str] = ("Hel", "lo", " there"),
        host: str = "127.0.0.1",
        keepalive_s: float = 5,
        tls: Identity | None = None,
    ) -> None:
        self.role = role
        self.models = tuple(models)
        self.engine_id = engine_id or f"{role}-engine-{next(_ports)}"
        self.connector = connector
        self.api_key = api_key
        self.text = tuple(text)
        self.legs: list[Leg] = []
        self.tokens: list[int] = list(range(200))
        """What `/tokenize` answers."""
        self.tokenized: list[dict[str, Any]] = []
        self.tokenize_hangs = False
        self.verdict: dict[str, Any] = {}
        """Overrides of the verdict."""
        self.usage: dict[str, Any] = {}
        """Overrides of the token counts of whole answers."""
        self.block_ids: list[list[int]] = [[1, 2, 3]]
        self.handed_off: list[str] = []
        """Request ids of all hand-offs."""
        self.crashed = False
        self.stored: dict[str, dict[str, Any]] = {}
        """Responses that it keeps."""
        self.stores = True
        """Whether it keeps responses (VLLM_ENABLE_RESPONSES_API_STORE)."""
        self.passed: list[Leg] = []
        """Requests that are no turns, `/tokenize` aside."""
        self.chunk_gate: asyncio.Event | None = None
        """When set, the stream waits for it after its first event."""
        self.port = 0
        self.list_gate: asyncio.Event | None = None
        """When set, `/v1/models` waits for it."""
        self._host = host
        self._tls = tls
        self._keepalive_s = keepalive_s
        self._steps: deque[Step] = deque()
        self._used: set[object] = set()
        self._doomed: set[object] = set()
        self._seen_ids: set[str] = set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens; after a stop, on the same port again."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/responses", self._complete)
        app.router.add_post("/v1/messages", self._complete)
        app.router.add_get("/v1/responses/{response_id}", self._stored)
        for path in ("/detokenize", "/v1/messages/count_tokens", "/v1/embeddings"):
            app.router.add_post(path, self._alone)
        app.router.add_route("*", "/{other:.*}", self._unknown)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, keepalive_timeout=self._keepalive_s
        )
        await self._runner.setup()
        context = ListenerContext(self._tls).front if self._tls else None
        site = web.TCPSite(self._runner, self._host, self.port, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops as a killed process does: running requests are cut."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        """Base URL."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    @property
    def connection_count(self) -> int:
        """Connections that are open."""
        server = self._runner.server if self._runner else None
        return len(server.connections) if server else 0

    def then(self, *steps: Step) -> None:
        """Scripts the next requests, one step each."""
        self._steps.extend(steps)

    def close_when_used(self) -> None:
        """Breaks every connection that has been used so far when its next request comes."""
        self._doomed = {*self._used}

    def forget_steps(self) -> None:
        """Behaves from now on."""
        self._steps.clear()

    # Endpoints

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _list_models(self, request: web.Request) -> web.Response:
        try:
            self._check_key(request)
        except RefusedError as refusal:
            return web.json_response(refusal.body, status=refusal.status)
        if self.list_gate is not None:
            await self.list_gate.wait()
        entries = [{"id": model, "object": "model", "max_model_len": 4096, "root": model} for model in self.models]
        return web.json_response({"object": "list", "data": entries})

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.tokenized.append(await request.json())
        if self.tokenize_hangs:
            await asyncio.Event().wait()
        return web.json_response({"tokens": self.tokens, "count": len(self.tokens), "max_model_len": 4096})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if request.transport in self._doomed:
            request.transport.abort()
            raise ConnectionResetError
        self._used.add(request.transport)
        raw = await request.read()
        leg = Leg(request.path, {k.lower(): v for k, v in request.headers.items()}, json.loads(raw), raw)
        self.legs.append(leg)
        try:
            response = await self._steps.popleft()(request, leg) if self._steps else None
            if response is None:
                self._check(request, leg)
                response = await (self._prefill(leg) if self.role == "prefill" else self._decode(request, leg))
            leg.answered = True
            return response
        except RefusedError as refusal:
            leg.answered = True
            return web.json_response(refusal.body, status=refusal.status)
        except (asyncio.CancelledError, ConnectionError):
            leg.closed_early.set()
            raise

    # vLLM's rules

    def _check_key(self, request: web.Request) -> None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise RefusedError(401, "Unauthorized", "Unauthorized")

    def _check(self, request: web.Request, leg: Leg) -> None:
        self._check_key(request)
        body = leg.body
        if request.content_type != "application/json":
            raise RefusedError(415, "Unsupported Media Type: Only 'application/json' is allowed")
        if body.get("model") not in self.models:
            raise RefusedError(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError", "model")
        self._check_unique(leg)
        if body.get("stream_options") and not body.get("stream"):
            raise RefusedError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.stored:
            message = f"Response with id '{previous}' not found."
            raise RefusedError(404, message, "invalid_request_error", "response_id")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 4096
        if body.get("min_tokens", 0) > limit:
            raise RefusedError(400, f"min_tokens must be less than or equal to max_tokens={limit}")
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise RefusedError(400, "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
        if body.get("tool_choice") not in (None, "none") and not body.get("tools"):
            raise RefusedError(400, "When using `tool_choice`, `tools` must be set.", param="tool_choice")
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= 128 or set(salt) & set("@/\\\0")):
            raise RefusedError(400, "Parameter 'cache_salt' is not valid.", param="cache_salt")
        self._check_params(leg)

    def _check_unique(self, leg: Leg) -> None:
        request_id = leg.headers.get("x-request-id", "")
        if not request_id or request_id in self._seen_ids:
            raise RefusedError(400, f"request id {request_id!r} seen before")
        self._seen_ids.add(request_id)

    def _check_params(self, leg: Leg) -> None:
        params, body = leg.params, leg.body
        if params is None:
            return
        if not isinstance(params, dict):
            raise RefusedError(400, "kv_transfer_params must be an object")
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
        if several or body.get("prompt_logprobs") is not None or body.get("echo") or (body.get("n") or 1) > 1:
            self.crashed = True
            raise RefusedError(500, "EngineCore encountered an issue", "InternalServerError")
        ours = params.get("backhaul")
        wanted = _LABEL_FIELDS if self.role == "decode" else _PROOF_FIELDS if params.get("remote_block_ids") else None
        if (set(ours) - {"continues", "traceparent"} if ours else None) != wanted:
            raise RefusedError(500, f"the connector cannot read {ours!r}", "InternalServerError")

    # Answers

    async def _prefill(self, leg: Leg) -> web.Response:
        body, params = leg.body, leg.params or {}
        limits = (body.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
        if body.get("stream") or next(filter(None, limits), None) != 1:
            raise RefusedError(500, "a prefill engine generates one token", "InternalServerError")
        reply = self._whole(leg, "H")
        if params.get("do_remote_decode"):
            reply["kv_transfer_params"] = self._hand_off(params)
        return web.json_response(reply)

    def _hand_off(self, params: dict[str, Any]) -> dict[str, Any]:
        request_id = f"cmpl-{next(_ports)}"
        self.handed_off.append(request_id)
        read = params["backhaul"]["token_count"] if params.get("remote_block_ids") else 0
        fields: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": self.block_ids,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": len(self.tokens),
        }
        if self.connector:
            verdict = {"prompt": len(self.tokens), "local": 0, "read": read, "verified": read, "spent": read > 0}
            fields["backhaul"] = {**verdict, "refused": "", **self.verdict}
        return fields

    async def _decode(self, request: web.Request, leg: Leg) -> web.StreamResponse:
        if not leg.body.get("stream"):
            reply = self._whole(leg, "".join(self.text))
            self._store(leg)
            if not self.connector and leg.params:
                reply["kv_transfer_params"] = {"remote_block_ids": [[9]], "remote_host": "10.0.0.9"}
            elif not self.connector:
                reply["kv_transfer_params"] = None
            return web.json_response(reply)
        if leg.path == "/v1/responses":
            self._store(leg)
            return await self.stream(request, response_events(leg.body, self.text, self._usage), done=False)
        if leg.path == "/v1/messages":
            return await self.stream(request, message_events(leg.body, self.text, self._usage), done=False)
        return await self.stream(request, [event_of(piece, leg.body["model"]) for piece in self.text])

    def _store(self, leg: Leg) -> None:
        if leg.path == "/v1/responses" and self.stores and leg.body.get("store", True):
            document = whole_response(leg.body, "".join(self.text), self._usage)
            self.stored[document["id"]] = document

    async def _stored(self, request: web.Request) -> web.Response:
        document = self.stored.get(request.match_info["response_id"])
        if document is None:
            refusal = RefusedError(404, "not found", "invalid_request_error", "response_id")
            return web.json_response(refusal.body, status=404)
        return web.json_response(document)

    async def _unknown(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.passed.append(Leg(request.path, {k.lower(): v for k, v in request.headers.items()}, {}, raw))
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _alone(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        leg = Leg(request.path, {k.lower(): v for k, v in request.headers.items()}, json.loads(raw), raw)
        self.passed.append(leg)
        step = await self._steps.popleft()(request, leg) if self._steps else None
        return step or web.json_response({"object": "list", "path": request.path})

    async def stream(self, request: web.Request, pieces: Sequence[bytes], *, done: bool = True) -> web.StreamResponse:
        """Sends server-sent events."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for index, piece in enumerate(pieces):
            await response.write(piece)
            if index == 0 and self.chunk_gate is not None:
                await self.chunk_gate.wait()
        if done:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    @property
    def _usage(self) -> dict[str, Any]:
        count = len(self.tokens)
        return {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1, **self.usage}

    def _whole(self, leg: Leg, text: str) -> dict[str, Any]:
        body = leg.body
        if leg.path == "/v1/responses":
            return whole_response(body, text, self._usage)
        if leg.path == "/v1/messages":
            return whole_message(body, text, self._usage)
        chat = "messages" in body
        choices = [
            {"index": index, "finish_reason": "length"}
            | ({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
            for index in range(body.get("n") or 1)
        ]
        return {
            "id": "x",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": body["model"],
            "choices": choices,
            "usage": self._usage,
        }


def event_of(text: str, model: str = "tiny") -> bytes:
    """Returns one chat event."""
    return chunk_of(model=model, choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


def role_event() -> bytes:
    """Returns the event with which a chat begins."""
    return chunk_of(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])


def failed_event() -> bytes:
    """Returns the event by which vLLM says that a request failed, as when its blocks could not be loaded."""
    error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def chunk_of(**fields: Any) -> bytes:
    """Returns one event of a chat."""
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "tiny", **fields}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


# Misbehaviour


def refuse(status: int, message: str = "no", headers: dict[str, str] | None = None) -> Step:
    """Answers with an error in vLLM's form."""

    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        return web.json_response(RefusedError(status, message).body, status=status, headers=headers)

    return step


def bare_500() -> Step:
    """Answers 500 without a reason, as a prefill engine that could not load blocks does."""

    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        return web.Response(status=500, text="Internal Server Error")

    return step


def hang() -> Step:
    """Never answers."""

    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return step


def late(seconds: float) -> Step:
    """Answers as ever, after a while."""

    async def step(request: web.Request, leg: Leg) -> None:
        await asyncio.sleep(seconds)

    return step


def reset() -> Step:
    """Closes the connection without an answer."""

    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    return step


def raw_stream(engine: FakeEngine, pieces: Sequence[bytes], *, done: bool = True) -> Step:
    """Streams exactly these bytes."""

    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        return await engine.stream(request, pieces, done=done)

    return step


def break_after(pieces: Sequence[bytes]) -> Step:
    """Streams these bytes, then cuts the connection."""

    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    return step


def answer(document: dict[str, Any], headers: dict[str, str] | None = None) -> Step:
    """Answers 200 with a document."""

    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        return web.json_response(document, headers=headers)

    return step
