"""The part of vLLM's HTTP server that says who it is: health, models, version."""

import asyncio
import json
from types import TracebackType
from typing import Self

from aiohttp import web

from backhaul_common.tls import Identity, ListenerContext


class FakeVllmHttp:
    """Listens on a free port of 127.0.0.1."""

    def __init__(self, *, tls: Identity | None = None) -> None:
        self._tls = tls
        self.healthy = True
        self.api_key = ""
        """Without it nobody is told the models; empty: everybody is."""
        self.moved_to = ""
        """Where health checks are sent on to; empty for nowhere."""
        self.late_count = 0
        """Health checks that will not be answered."""
        self.models = ["model-1"]
        self.models_status = 200
        self.piece_bytes = 0
        """Sends the list of models in pieces of this size; 0: whole."""
        self.body: bytes | None = None
        """Answer to what it is asked about itself, in place of the right one."""
        self.metrics = ""
        """Answer to /metrics; none when empty."""
        self.requests: list[str] = []
        self.port = 0
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/v1/models", self._list_models)
        application.router.add_get("/version", self._version)
        application.router.add_get("/metrics", self._show_metrics)
        self._runner = web.AppRunner(application, handler_cancellation=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def start(self) -> None:
        """Listens, on the same port as before if there was one."""
        await self._runner.setup()
        context = ListenerContext(self._tls).front if self._tls else None
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        """Base URL."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def _health(self, request: web.Request) -> web.Response:
        self.requests.append(request.path)
        if self.late_count:
            self.late_count -= 1
            await asyncio.Event().wait()
        if self.moved_to:
            return web.Response(status=307, headers={"location": self.moved_to})
        return web.Response(status=200 if self.healthy else 503)

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.path)
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.body is not None:
            return web.Response(body=self.body)
        data = [{"id": name, "object": "model", "max_model_len": 4096} for name in self.models]
        document = {"object": "list", "data": data}
        if not self.piece_bytes:
            return web.json_response(document, status=self.models_status)
        return await self._in_pieces(request, json.dumps(document).encode())

    async def _in_pieces(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(body), self.piece_bytes):
            await response.write(body[start : start + self.piece_bytes])
            await asyncio.sleep(0)
        return response

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=200 if self.metrics else 404)

    async def _version(self, request: web.Request) -> web.Response:
        self.requests.append(request.path)
        if self.body is not None:
            return web.Response(body=self.body)
        return web.json_response({"version": "0.32.0"})
