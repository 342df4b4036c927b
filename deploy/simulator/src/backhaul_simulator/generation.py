"""Serves chats and completions."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from backhaul_simulator.answers import Step, run
from backhaul_simulator.engine import Engine
from backhaul_simulator.faults import Faults, FinishError, NoParams, SlowReads
from backhaul_simulator.messages import parse_message
from backhaul_simulator.openai_checks import Served
from backhaul_simulator.openai_errors import RefusedError, engine_dead, failed
from backhaul_simulator.openai_replies import ChatReply, CompletionReply, Progress
from backhaul_simulator.openai_requests import Job, parse_chat, parse_completion
from backhaul_simulator.requests import EngineDeadError, LoadFailedError
from backhaul_simulator.responses import ResponseStore, parse_response
from backhaul_simulator.strikes import Strike

_encode = msgspec.json.Encoder().encode


class Reply(Protocol):
    """How an endpoint forms its answers."""

    def accepted(self) -> Iterator[bytes]:
        """Events that come before anything is computed."""
        ...

    def opening(self) -> Iterator[bytes]:
        """Events before the first token."""
        ...

    def piece(self, step: Step, *, first: bool, usage: Mapping[str, Any] | None) -> bytes:
        """Events of a step; ``first`` of its choice."""
        ...

    def closing(self, progress: Progress) -> Iterator[bytes]:
        """Events after the last token."""
        ...

    def failed(self, document: Mapping[str, Any]) -> Iterator[bytes]:
        """Events of an error; ConnectionResetError breaks the stream off."""
        ...

    def whole(self, progress: Progress) -> dict[str, Any]:
        """The document of a reply that is not streamed."""
        ...


class Generation:
    """Chats and their like over the ranks of one server."""

    def __init__(self, engines: Sequence[Engine], served: Served, faults: Faults, store: ResponseStore) -> None:
        self._engines = engines
        self._served = served
        self._faults = faults
        self._store = store

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Handles ``POST /v1/chat/completions``."""

        def read(raw: bytes) -> tuple[Job, Reply, str]:
            job = parse_chat(raw, self._served)
            request_id = _request_id("chatcmpl", request)
            return job, ChatReply(job, reply_id=request_id, model=self._served.model, created=_now()), request_id

        return await self._serve(request, read)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """Handles ``POST /v1/completions``."""

        def read(raw: bytes) -> tuple[Job, Reply, str]:
            job = parse_completion(raw, self._served)
            request_id = _request_id("cmpl", request)
            return job, CompletionReply(job, reply_id=request_id, model=self._served.model, created=_now()), request_id

        return await self._serve(request, read)

    async def response(self, request: web.Request) -> web.StreamResponse:
        """Handles ``POST /v1/responses``."""

        def read(raw: bytes) -> tuple[Job, Reply, str]:
            job, reply = parse_response(raw, self._served, self._store)
            return job, reply, f"{reply.name}_0"

        return await self._serve(request, read, ranked=False)

    async def message(self, request: web.Request) -> web.StreamResponse:
        """Handles ``POST /v1/messages``."""

        def read(raw: bytes) -> tuple[Job, Reply, str]:
            job, reply = parse_message(raw, self._served)
            reply.name = _request_id("chatcmpl", request)
            return job, reply, reply.name

        return await self._serve(request, read)

    async def _serve(
        self, request: web.Request, read: Callable[[bytes], tuple[Job, Reply, str]], *, ranked: bool = True
    ) -> web.StreamResponse:
        """``ranked``: whether the endpoint takes a rank."""
        raw = await request.read()
        fault = self._faults.take(request.path, raw)
        strike = Strike(request, fault)
        await strike.before_engine()
        job, reply, request_id = read(raw)
        engine = self._pick(request.headers.get("X-data-parallel-rank") if ranked else None)
        if isinstance(fault, FinishError):
            steps = _finish_error()
        else:
            block_s = fault.seconds_per_block if isinstance(fault, SlowReads) else None
            steps = run(engine, job, request_id, read_block_s=block_s)
        async with contextlib.aclosing(steps):
            if job.stream:
                return await _stream(request, _events(job, reply, steps), strike)
            document = reply.whole(await _finished(job, steps))
        if isinstance(fault, NoParams):
            document["kv_transfer_params"] = None
        await strike.before_reply()
        return web.Response(body=_encode(document), content_type="application/json")

    def _pick(self, wanted: str | None) -> Engine:
        """Returns the rank that the client asks for, else the one with the least to do (`v1/engine/core_client.py`)."""
        with contextlib.suppress(ValueError):
            rank = int(wanted or "")
            if not 0 <= rank < len(self._engines):
                raise RefusedError(f"data_parallel_rank {rank} is out of range [0, {len(self._engines)}).")
            return self._engines[rank]
        if len(self._engines) == 1:
            return self._engines[0]
        return min(self._engines, key=_load)


def _request_id(prefix: str, request: web.Request) -> str:
    return f"{prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"


def _now() -> int:
    return int(time.time())


def _load(engine: Engine) -> int:
    stats = engine.stats()
    return 4 * stats.waiting + stats.running


async def _finished(job: Job, steps: AsyncIterator[Step]) -> Progress:
    progress = Progress(job)
    try:
        async for step in steps:
            progress.add(step)
    except Exception as error:
        raise _refusal(error) from error
    return progress


async def _events(job: Job, reply: Reply, steps: AsyncIterator[Step]) -> AsyncGenerator[bytes]:
    """Yields a stream's events; what fails becomes one. Raises ConnectionResetError when it is to be broken off."""
    progress = Progress(job)
    begun: set[int] = set()
    opened = False
    for event in reply.accepted():
        yield event
    try:
        async for step in steps:
            if not opened:
                opened = True
                for event in reply.opening():
                    yield event
            progress.add(step)
            usage = progress.usage() if job.continuous_usage else None
            yield reply.piece(step, first=step.choice not in begun, usage=usage)
            begun.add(step.choice)
        for event in reply.closing(progress):
            yield event
    except Exception as error:  # noqa: BLE001  # whatever fails, the client is told in the stream
        if isinstance(error, LoadFailedError) and not opened:
            # To vLLM's server this is an output with the finish reason "error", and the first output brings the role.
            for event in reply.opening():
                yield event
        for event in reply.failed(_refusal(error).document):
            yield event


async def _stream(request: web.Request, events: AsyncGenerator[bytes], strike: Strike) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    count = 0
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                if event:
                    await response.write(event)
                count += 1
                await strike.after_events(count)
        except ConnectionResetError:
            if request.transport is not None:
                request.transport.close()
            raise
    await response.write_eof()
    await strike.after_stream()
    return response


async def _finish_error() -> AsyncGenerator[Step]:
    yield Step(
        choice=0, prompt=0, token=None, text="", whole_text="", finish_reason="error", stop_reason=None,
        cached_tokens=0, kv_transfer_params=None,
    )  # fmt: skip


def _refusal(error: Exception) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, LoadFailedError):
        return failed()
    if isinstance(error, EngineDeadError):
        return engine_dead()
    if isinstance(error, ValueError):
        return RefusedError(str(error))
    raise error
