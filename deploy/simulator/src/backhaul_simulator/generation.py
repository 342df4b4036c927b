"""Serves chats and completions."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import msgspec
from aiohttp import web

from backhaul_simulator.answers import Step, run
from backhaul_simulator.engine import Engine
from backhaul_simulator.faults import Faults, FinishError, NoParams, SlowReads
from backhaul_simulator.openai_checks import Served
from backhaul_simulator.openai_errors import RefusedError, engine_dead, failed
from backhaul_simulator.openai_replies import DONE, ChatReply, CompletionReply, Progress, Reply, error_event
from backhaul_simulator.openai_requests import Job, parse_chat, parse_completion
from backhaul_simulator.requests import EngineDeadError, LoadFailedError
from backhaul_simulator.strikes import Strike

_encode = msgspec.json.Encoder().encode


class Generation:
    """Chats and completions over the ranks of one server."""

    def __init__(self, engines: Sequence[Engine], served: Served, faults: Faults) -> None:
        self._engines = engines
        self._served = served
        self._faults = faults

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Handles ``POST /v1/chat/completions``."""
        return await self._serve(request, parse_chat, ChatReply)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """Handles ``POST /v1/completions``."""
        return await self._serve(request, parse_completion, CompletionReply)

    async def _serve(
        self, request: web.Request, parse: Callable[[bytes, Served], Job], kind: Callable[..., Reply]
    ) -> web.StreamResponse:
        raw = await request.read()
        fault = self._faults.take(request.path, raw)
        strike = Strike(request, fault)
        await strike.before_engine()
        job = parse(raw, self._served)
        engine = self._pick(request.headers.get("X-data-parallel-rank"))
        prefix = "chatcmpl" if job.chat else "cmpl"
        request_id = f"{prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"
        reply = kind(job, reply_id=request_id, model=self._served.model, created=int(time.time()))
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
    """Yields a stream's events; what fails becomes one (``chat_completion_stream_generator``)."""
    progress = Progress(job)
    begun: set[int] = set()
    opened = False
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
        if job.usage:
            yield reply.ending(progress.usage())
    except Exception as error:  # noqa: BLE001  # whatever fails, the client is told in the stream
        if isinstance(error, LoadFailedError) and not opened:
            # To vLLM's server this is an output with the finish reason "error", and the first output brings the role.
            for event in reply.opening():
                yield event
        yield error_event(_refusal(error).document)
    yield DONE


async def _stream(request: web.Request, events: AsyncGenerator[bytes], strike: Strike) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    count = 0
    async with contextlib.aclosing(events):
        async for event in events:
            await response.write(event)
            count += 1
            await strike.after_events(count)
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
