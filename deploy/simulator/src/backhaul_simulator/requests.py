"""What the server asks of an engine, and what it gets back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "error"]


class LoadFailedError(Exception):
    """The KV blocks of a request could not be loaded: vLLM answers a bare 500 (``kv_load_failure_policy: fail``)."""


class EngineDeadError(Exception):
    """The engine's loop has ended; it serves nothing any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to an engine."""

    request_id: str
    """The engine adds a random end to it, as vLLM does (``v1/engine/input_processor.py``, ``assign_request_id``)."""
    prompt: list[int]
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str = ""
    """Part of the first block's hash; requests with different salts share no prefix."""
    session_id: str | None = None
    """Label that KV events of this request repeat."""
    read_block_s: float | None = None
    """Seconds per block of this request's remote read; None: as the engine is set."""


@dataclass(frozen=True, slots=True)
class Output:
    """One step of a request. The last one has a finish reason."""

    token: int | None
    finish_reason: FinishReason | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """Only with the finish reason."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed: found in the prefix cache or read from another engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Figures of an engine, as vLLM's own metrics have them."""

    engine_id: str
    running: int
    waiting: int
    """Requests that wait for memory, for their turn or for a read."""
    blocks: int
    """Blocks of the pool, the null block left out."""
    blocks_free: int
    """Blocks that can be given to a request: unused ones and those that only the prefix cache holds."""
    prefix_queries: int
    """Tokens that were looked up in the prefix cache."""
    prefix_hits: int
    external_tokens: int
    """Tokens of prompts read from another engine."""
    local_tokens: int
    """Tokens of prompts found in the prefix cache."""
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    finished: Mapping[str, int] = field(default_factory=dict)
    """Finished requests by reason: stop, length, abort, error."""
