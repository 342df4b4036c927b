"""Asks an engine to keep the blocks of a prompt for a reader: a completion of one token with ``do_remote_decode``.

To the engine it is a prefill leg (vllm/.../nixl/pull_scheduler.py, ``request_finished``): its blocks stay pinned for
``kv_lease_duration``, or until somebody reads or releases them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from backhaul_common.errors import UnavailableError
from backhaul_common.tls import CallerContext
from backhaul_common.trace_context import trace_headers
from backhaul_connector import wire
from backhaul_node_agent.core import bounds

_MAX_BODY_BYTES = 4 * 1024 * 1024
_LATE_S = 1.0
"""How long an answer that has begun is read on when its caller has left, to learn what is to be released."""
_NOT_OURS = frozenset({wire.PARAMS_KEY, "remote_prefill_cached_tokens"})
"""What the engine adds for the decode leg of a cold turn."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What the engine keeps."""

    params: dict[str, Any]
    """vLLM's kv_transfer_params."""
    engine_id: str
    hand_off_id: str
    block_ids: list[int]
    token_count: int
    tp_size: int
    expiry: float | None
    """Engine's clock; only the connector says it."""
    computed_count: int | None
    """Tokens that the engine had to compute; None when it does not say so."""


class _Params(msgspec.Struct):
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[list[int]]
    remote_num_tokens: int
    remote_host: str
    remote_port: int
    tp_size: int = 1
    remote_blocks_expiry_time: float | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
    usage: _Usage | None = None


class EngineRequests:
    """Requests of this agent to the server beside it. An async context manager."""

    def __init__(self, url: str, *, api_key: str, tls: CallerContext | None = None) -> None:
        self._url = url
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._late: set[asyncio.Task[None]] = set()
        """Answers whose callers have left, each for `_LATE_S` at most."""

    async def __aenter__(self) -> Self:
        # `trust_env` stays off: the server is beside this agent, no proxy is on the way.
        self._http = aiohttp.ClientSession(trust_env=False, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for late in self._late:
            late.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._http.close()

    async def keep(
        self,
        *,
        model: str,
        token_ids: Sequence[int],
        salt: str,
        rank: int | None,
        left_over: Callable[[Kept], None],
    ) -> Kept:
        """Has the prompt's blocks kept, in the engine of a data-parallel `rank` (None: there is one).

        Raises UnavailableError (ENGINE_FAILED). Cancellation closes the connection, which ends the engine's work; when
        the engine has begun to answer, `left_over` gets what nobody will read, a moment after this has returned.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        if salt:
            body["cache_salt"] = salt
        headers = {"Content-Type": "application/json", **trace_headers()}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        try:
            response = await self._http.post(
                f"{self._url}/v1/completions",
                data=msgspec.json.encode(body),
                headers=headers,
                # Elsewhere nobody is to get the key and the prompt.
                allow_redirects=False,
                ssl=self._tls.current() if self._tls else True,
            )
            raw = await self._whole(response, left_over)
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError("ENGINE_FAILED", f"the engine does not answer: {type(error).__name__}") from error
        if response.status != 200:
            raise UnavailableError("ENGINE_FAILED", f"the engine answers {response.status}")
        return _kept(raw)

    async def _whole(self, response: aiohttp.ClientResponse, left_over: Callable[[Kept], None]) -> bytes:
        """Reads a body whose head has come. A caller that leaves, be it told so twice, does not wait for the rest."""
        reading = asyncio.create_task(_read(response))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            late = asyncio.create_task(_read_on(response, reading, left_over))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            raise


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Reads a body and lets go of its connection."""
    async with response:
        body = bytearray()
        while len(body) < _MAX_BODY_BYTES and (piece := await response.content.readany()):
            body += piece
        return bytes(body)


async def _read_on(
    response: aiohttp.ClientResponse, reading: "asyncio.Task[bytes]", left_over: Callable[[Kept], None]
) -> None:
    """Passes on what an answer holds for which nobody waits, if it comes in time."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, UnavailableError):
        async with asyncio.timeout(_LATE_S):
            raw = await reading
        if response.status == 200:
            left_over(_kept(raw))


def _kept(raw: bytes) -> Kept:
    try:
        answer = msgspec.json.decode(raw, type=_Answer)
        params = msgspec.convert(answer.kv_transfer_params, _Params)
        bounds.check_request_id(params.remote_request_id, "remote_request_id", most_bytes=bounds.MAX_HAND_OFF_ID_BYTES)
        bounds.check_count(params.tp_size, "tp_size", least=1, most=bounds.MAX_TP_SIZE)
        if params.remote_blocks_expiry_time is not None:
            bounds.check_instant(params.remote_blocks_expiry_time, "remote_blocks_expiry_time")
        if len(params.remote_block_ids) != 1:
            raise ValueError("blocks of several cache groups")
    except (ValueError, RecursionError) as error:
        raise UnavailableError("ENGINE_FAILED", f"the engine's answer holds no handle: {error}"[:512]) from error
    assert answer.kv_transfer_params is not None
    return Kept(
        params={name: value for name, value in answer.kv_transfer_params.items() if name not in _NOT_OURS},
        engine_id=params.remote_engine_id,
        hand_off_id=params.remote_request_id,
        block_ids=params.remote_block_ids[0],
        token_count=params.remote_num_tokens,
        tp_size=params.tp_size,
        expiry=params.remote_blocks_expiry_time,
        computed_count=_computed(answer),
    )


def _computed(answer: _Answer) -> int | None:
    """Reads it from the usage (``--enable-prompt-tokens-details``), else from what the connector says."""
    assert answer.kv_transfer_params is not None
    usage = answer.usage
    if usage is not None and usage.prompt_tokens_details is not None:
        return max(0, usage.prompt_tokens - (usage.prompt_tokens_details.cached_tokens or 0))
    verdict = answer.kv_transfer_params.get(wire.PARAMS_KEY)
    if isinstance(verdict, dict):
        prompt, local = verdict.get("prompt"), verdict.get("local")
        if isinstance(prompt, int) and isinstance(local, int):
            return max(0, prompt - local)
    return None
