"""Runs the sequences of a request on an engine: one step per token, its text with it, until something ends it."""

import asyncio
import contextlib
import copy
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from backhaul_simulator.answer_text import AnswerText
from backhaul_simulator.openai_requests import Job
from backhaul_simulator.requests import FinishReason, Output, Request

_AHEAD = 64
"""Steps of all sequences that may wait to be sent. An engine that is ahead of its client waits."""


class Generator(Protocol):
    """What is used of an engine."""

    def generate(self, request: Request) -> AsyncGenerator[Output]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a sequence has more."""

    choice: int
    """Position among all choices of the reply."""
    prompt: int
    """Position of its prompt."""
    token: int | None
    text: str
    """To be shown now; may be less or more than the token's own."""
    whole_text: str
    """All of the answer so far."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    cached_tokens: int
    kv_transfer_params: dict[str, Any] | None


async def run(
    engine: Generator, job: Job, request_id: str, *, read_block_s: float | None = None
) -> AsyncGenerator[Step]:
    """Yields the steps of all sequences of a request. Closing it aborts those that have not ended.

    Raises what the engine raises.
    """
    sequences = [
        _sequence(engine, job, prompt, choice, request_id, read_block_s)
        for prompt in range(len(job.prompts))
        for choice in range(job.choices)
    ]
    steps = sequences[0] if len(sequences) == 1 else _merged(sequences)
    async with contextlib.aclosing(steps):
        async for step in steps:
            yield step


async def _sequence(
    engine: Generator, job: Job, prompt: int, choice: int, request_id: str, read_block_s: float | None
) -> AsyncGenerator[Step]:
    text = AnswerText(stop=job.stop, include_stop=job.include_stop, min_tokens=job.min_tokens)
    request = _request(job, prompt, choice, request_id, read_block_s)
    async with contextlib.aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            stop: str | None = None
            if output.token is not None:
                stop = text.add(output.token, ends=output.finish_reason == "stop")
            finish: FinishReason | None = "stop" if stop is not None else output.finish_reason
            yield Step(
                choice=prompt * job.choices + choice,
                prompt=prompt,
                token=output.token,
                text=text.delta(finished=finish is not None),
                whole_text=text.text,
                finish_reason=finish,
                stop_reason=stop if stop is not None else _stop_token(job, output),
                cached_tokens=output.cached_tokens,
                kv_transfer_params=output.kv_transfer_params,
            )
            if stop is not None:
                # The engine knows nothing of stop strings: to it this is an abort (v1/engine/output_processor.py).
                return


def _request(job: Job, prompt: int, choice: int, request_id: str, read_block_s: float | None) -> Request:
    """Names are made as vLLM makes them (`input_processor.py`, `parallel_sampling.py`): unique on every engine."""
    name = f"{request_id}-{uuid.uuid4().hex[:8]}" if job.chat else f"{request_id}-{prompt}-{uuid.uuid4().hex[:8]}"
    return Request(
        request_id=name if job.choices == 1 else f"{choice}_{name}",
        prompt=job.prompts[prompt],
        max_tokens=job.max_tokens[prompt],
        min_tokens=job.min_tokens,
        ignore_eos=job.ignore_eos,
        stop_token_ids=job.stop_token_ids,
        # Each sequence reaches vLLM's engine as a message of its own.
        kv_transfer_params=copy.deepcopy(job.kv_transfer_params),
        cache_salt=job.cache_salt,
        session_id=job.session_id,
        read_block_s=read_block_s,
    )


def _stop_token(job: Job, output: Output) -> int | None:
    return output.token if output.finish_reason == "stop" and output.token in job.stop_token_ids else None


async def _merged(sources: Sequence[AsyncGenerator[Step]]) -> AsyncGenerator[Step]:
    queue: asyncio.Queue[Step | Exception | None] = asyncio.Queue(_AHEAD)

    async def follow(source: AsyncGenerator[Step]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for step in source:
                    await queue.put(step)
        except Exception as error:  # noqa: BLE001  # the consumer raises it
            await queue.put(error)
        else:
            await queue.put(None)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(source)) for source in sources]
        try:
            async for step in _until_all_ended(queue, len(sources)):
                yield step
        finally:
            for task in tasks:
                task.cancel()


async def _until_all_ended(queue: "asyncio.Queue[Step | Exception | None]", count: int) -> AsyncIterator[Step]:
    while count:
        item = await queue.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            count -= 1
        else:
            yield item
