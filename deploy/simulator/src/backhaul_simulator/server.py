"""The HTTP server: the part of vLLM 0.32's surface that routers and agents use, and the simulator's own endpoints."""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from backhaul_simulator.engine import Engine
from backhaul_simulator.faults import Faults
from backhaul_simulator.generation import Generation
from backhaul_simulator.messages import count_tokens
from backhaul_simulator.metrics import CONTENT_TYPE, Sample, engine_samples, exposition, ledger_samples
from backhaul_simulator.openai_checks import Served
from backhaul_simulator.openai_errors import RefusedError, malformed
from backhaul_simulator.openai_requests import parse_detokenize, parse_tokenize
from backhaul_simulator.responses import ResponseStore
from backhaul_simulator.strikes import Strike

_log = logging.getLogger(__name__)

VERSION = "0.32.0"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """One server over one engine per rank."""

    def __init__(
        self, engines: Sequence[Engine], served: Served, *, block_size: int, api_key: str = "", store: bool = False
    ) -> None:
        self._engines = engines
        self._served = served
        self._block_size = block_size
        self._api_key = api_key
        self._faults = Faults()
        self._store = ResponseStore(enabled=store)
        self._created = int(time.time())
        self.healthy = True
        """Whether the engines live."""

    def application(self) -> web.Application:
        """Returns the routes."""
        generation = Generation(self._engines, self._served, self._faults, self._store)
        # No limit on bodies, like vLLM.
        app = web.Application(client_max_size=0, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", generation.chat)
        app.router.add_post("/v1/completions", generation.completion)
        app.router.add_post("/v1/responses", generation.response)
        app.router.add_get("/v1/responses/{response_id}", self._response)
        app.router.add_post("/v1/messages", generation.message)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_get("/simulator/ledger", self._ledger)
        app.router.add_get("/simulator/faults", self._show_faults)
        app.router.add_post("/simulator/faults", self._add_faults)
        app.router.add_delete("/simulator/faults", self._clear_faults)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Asks for the key and for JSON, and gives errors their form."""
        if self._api_key and request.path.startswith("/v1") and not self._knows_key(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            if request.method == "POST" and request.path in _JSON_ONLY and request.content_type != "application/json":
                raise malformed("Unsupported Media Type: Only 'application/json' is allowed", None)
            return await handler(request)
        except RefusedError as refusal:
            return web.json_response(refusal.document_at(request.path), status=refusal.status)
        except web.HTTPException as error:
            # What FastAPI says of a path or a method that it does not know.
            return web.json_response({"detail": error.reason}, status=error.status)
        except Exception as error:  # noqa: BLE001  # the boundary of requests: a client is told, as by vLLM
            _log.exception("request failed")
            plain = RefusedError(str(error), status=500, kind="InternalServerError")
            return web.json_response(plain.document, status=500)

    def _knows_key(self, request: web.Request) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(key.encode(), self._api_key.encode())

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._served.model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._served.model,
            "parent": None,
            "max_model_len": self._served.max_model_len,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        raw = await request.read()
        await Strike(request, self._faults.take(request.path, raw)).before_engine()
        tokens = parse_tokenize(raw, self._served)
        limit = self._served.max_model_len
        return web.json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})

    async def _response(self, request: web.Request) -> web.Response:
        return web.json_response(self._store.document(request.match_info["response_id"]))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        count = count_tokens(await request.read(), self._served)
        return web.json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": parse_detokenize(await request.read(), self._served)})

    async def _metrics(self, request: web.Request) -> web.Response:
        samples: list[Sample] = []
        for engine in self._engines:
            rank, stats = engine.rank, engine.stats()
            samples += engine_samples(stats, rank=rank, model=self._served.model, block_size=self._block_size)
            samples += ledger_samples(engine.ledger(), rank=rank)
        return web.Response(body=exposition(samples).encode(), headers={"content-type": CONTENT_TYPE})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        results = [engine.reset_prefix_cache() for engine in self._engines]
        return web.json_response({"success": all(results)})

    async def _ledger(self, request: web.Request) -> web.Response:
        return web.json_response({"ranks": [self._rank_ledger(engine) for engine in self._engines]})

    def _rank_ledger(self, engine: Engine) -> dict[str, Any]:
        return {"engine_id": engine.engine_id, **engine.ledger()}

    async def _show_faults(self, request: web.Request) -> web.Response:
        return web.json_response(self._faults.left())

    async def _add_faults(self, request: web.Request) -> web.Response:
        try:
            self._faults.add(await request.read())
        except ValueError as error:
            raise RefusedError(str(error)) from error
        return web.json_response(self._faults.left())

    async def _clear_faults(self, request: web.Request) -> web.Response:
        self._faults.clear()
        return web.json_response(self._faults.left())


_JSON_ONLY = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    }
)
