"""What the agent makes of a server that answers a request for a handle, or does not."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul_common.errors import UnavailableError
from backhaul_common.trace_context import traceparent_of
from backhaul_node_agent.engine_requests import EngineRequests, Kept
from tests.fakes import block_sets
from tests.fakes.eventually import eventually

PARAMS = {
    **block_sets.engine_params("cmpl-1", 33, 16, remote_blocks_expiry_time=None),
    "do_remote_prefill": True,
    "do_remote_decode": False,
}
USAGE = {"prompt_tokens": 33, "prompt_tokens_details": {"cached_tokens": 32}}

pytestmark = pytest.mark.timeout(60)


@dataclass
class FakeServer:
    """Answers completions with what it was given."""

    status: int = 200
    moved_to: str = ""
    """Where it sends requests on to; empty for nowhere."""
    body: bytes = b""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    silent: bool = False
    halting: asyncio.Event | None = None
    """Set: the body's second half waits for it."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: int = 0
    url: str = ""

    def answer(self, *, params: Any = PARAMS, **more: Any) -> None:
        self.body = json.dumps({"kv_transfer_params": params, "usage": USAGE, **more}).encode()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.begun.set()
        if self.silent:
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted += 1
        where = {"location": self.moved_to} if self.moved_to else {}
        response = web.StreamResponse(status=self.status, headers={"Content-Type": "application/json", **where})
        await response.prepare(request)
        if self.halting is not None:
            await response.write(self.body[:10])
            await self.halting.wait()
            await response.write(self.body[10:])
        else:
            await response.write(self.body)
        return response


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    server.answer()
    application = web.Application()
    application.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def keep(requests: EngineRequests, left_over: list[Kept] | None = None, **more: Any) -> Kept:
    arguments = {"model": "model", "token_ids": list(range(33)), "salt": "", "rank": None, **more}
    taken = [] if left_over is None else left_over
    return await requests.keep(**arguments, left_over=taken.append)


async def test_the_request_is_a_prefill_leg_of_one_token() -> None:
    async with serving() as server, EngineRequests(server.url, api_key="secret") as requests:
        kept = await keep(requests, salt="pepper", rank=3)
        await keep(requests)
    salted, plain = server.bodies
    assert (salted["prompt"], salted["max_tokens"], salted["stream"]) == (list(range(33)), 1, False)
    assert salted["kv_transfer_params"]["do_remote_decode"] is True
    assert (salted["cache_salt"], "cache_salt" in plain) == ("pepper", False)
    assert [headers.get("X-data-parallel-rank") for headers in server.headers] == ["3", None]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert (kept.hand_off_id, kept.engine_id, kept.token_count) == ("cmpl-1", "engine-d", 33)
    assert (kept.computed_count, kept.expiry, len(kept.block_ids)) == (1, None, 3)


async def test_the_engine_continues_the_trace_of_who_asked(spans: InMemorySpanExporter) -> None:
    async with serving() as server, EngineRequests(server.url, api_key="") as requests:
        with trace.get_tracer("test").start_as_current_span("harvest") as span:
            current = traceparent_of(span)
            await keep(requests)
        await keep(requests)
    assert [headers.get("traceparent") for headers in server.headers] == [current, None]


async def test_a_server_cannot_send_prompt_and_key_elsewhere() -> None:
    async with serving() as elsewhere, serving() as server, EngineRequests(server.url, api_key="secret") as requests:
        server.status, server.moved_to = 307, f"{elsewhere.url}/v1/completions"
        with pytest.raises(UnavailableError, match="answers 307"):
            await keep(requests)
    assert elsewhere.bodies == []


async def test_what_the_connector_adds_is_read_and_not_passed_on() -> None:
    async with serving() as server, EngineRequests(server.url, api_key="") as requests:
        verdict = {"prompt": 33, "local": 16, "read": 0}
        extended = {**PARAMS, "backhaul": verdict, "remote_prefill_cached_tokens": 16}
        server.answer(params={**extended, "remote_blocks_expiry_time": 77.5}, usage=None)
        kept = await keep(requests)
    assert (kept.computed_count, kept.expiry) == (17, 77.5)
    assert kept.params.keys() == PARAMS.keys()


async def test_an_engine_that_does_not_say_what_it_computed_is_believed_nothing() -> None:
    async with serving() as server, EngineRequests(server.url, api_key="") as requests:
        server.answer(usage={"prompt_tokens": 33})
        assert (await keep(requests)).computed_count is None


ANSWERS: dict[str, tuple[int, bytes]] = {
    "an-error": (500, b"{}"),
    "not-json": (200, b"<html>"),
    "no-params": (200, b'{"kv_transfer_params": null}'),
    "half-params": (200, json.dumps({"kv_transfer_params": {"remote_request_id": "cmpl-1"}}).encode()),
    "two-groups": (200, json.dumps({"kv_transfer_params": {**PARAMS, "remote_block_ids": [[1], [2]]}}).encode()),
    "an-id-of-two": (200, json.dumps({"kv_transfer_params": {**PARAMS, "remote_request_id": "a,b"}}).encode()),
    "an-odd-time": (200, json.dumps({"kv_transfer_params": {**PARAMS, "remote_blocks_expiry_time": 1e300}}).encode()),
    "an-odd-size": (200, json.dumps({"kv_transfer_params": {**PARAMS, "tp_size": 10**6}}).encode()),
}  # fmt: skip


@pytest.mark.parametrize(("status", "body"), ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_without_a_sound_handle_is_a_failure(status: int, body: bytes) -> None:
    async with serving() as server, EngineRequests(server.url, api_key="") as requests:
        server.status, server.body = status, body
        with pytest.raises(UnavailableError) as caught:
            await keep(requests)
        assert caught.value.reason == "ENGINE_FAILED"


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with EngineRequests("http://127.0.0.1:1", api_key="") as requests:
        with pytest.raises(UnavailableError):
            await keep(requests)


async def test_a_caller_that_leaves_ends_the_engines_work() -> None:
    async with serving() as server, EngineRequests(server.url, api_key="") as requests:
        server.silent = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await keep(requests)
        await eventually(lambda: server.aborted == 1)


@pytest.mark.parametrize("times", [1, 2])
async def test_what_the_engine_answers_to_a_caller_that_has_left_is_not_forgotten(times: int) -> None:
    """A call whose time is over is often cancelled by its own limit and by its client at once."""
    async with serving() as server, EngineRequests(server.url, api_key="") as requests:
        server.halting = asyncio.Event()
        left_over: list[Kept] = []
        asking = asyncio.create_task(keep(requests, left_over))
        await server.begun.wait()
        await asyncio.sleep(0.1)
        for _ in range(times):
            asking.cancel()
            await asyncio.sleep(0)
        server.halting.set()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await eventually(lambda: [kept.hand_off_id for kept in left_over] == ["cmpl-1"])


async def test_a_caller_that_leaves_does_not_wait_for_the_rest_of_an_answer() -> None:
    async with serving() as server, EngineRequests(server.url, api_key="") as requests:
        server.halting = asyncio.Event()
        asking = asyncio.create_task(keep(requests))
        await server.begun.wait()
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait([asking], timeout=0.5)
        assert asking.cancelled()
        server.halting.set()
