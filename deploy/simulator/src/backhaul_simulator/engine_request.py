"""A request inside the engine, with the attributes of vLLM's own that a connector reads (``v1/request.py``)."""

import enum
import hashlib
from array import array
from typing import Any

from backhaul_simulator.requests import FinishReason, Request


class RequestStatus(enum.IntEnum):
    """Names and order are vLLM's: whatever comes after PREEMPTED is finished."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    FINISHED_ERROR = enum.auto()
    FINISHED_REPETITION = enum.auto()

    @staticmethod
    def is_finished(status: "RequestStatus") -> bool:
        """Tells whether a request with this status is over."""
        return status > RequestStatus.PREEMPTED


FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ERROR: "error",
}


class EngineRequest:
    """State of one request: its tokens, its blocks, and how far it is computed."""

    prompt_embeds: Any = None
    lora_request: Any = None

    def __init__(self, asked: Request, *, request_id: str, max_tokens: int, block_size: int) -> None:
        self.asked = asked
        self.request_id = request_id
        self.prompt_token_ids = list(asked.prompt)
        self.num_prompt_tokens = len(asked.prompt)
        self.max_tokens = max_tokens
        self.all_token_ids = list(asked.prompt)
        self.kv_transfer_params: dict[str, Any] | None = asked.kv_transfer_params
        self.cache_salt = asked.cache_salt or None
        self.mm_features: list[Any] = []
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.local_tokens = 0
        """Tokens found in the prefix cache when the request was last admitted."""
        self.external_tokens = 0
        """Tokens read from another engine when it was first admitted."""
        self.cached_tokens = 0
        """Tokens found there or read from another engine when it was first admitted."""
        self._block_size = block_size
        self._hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def may_stop(self) -> bool:
        """Whether the next token may end the turn (``min_tokens``)."""
        return self.num_output_tokens >= self.asked.min_tokens

    def block_hashes(self, count: int) -> list[bytes]:
        """Returns the hashes of at least the first ``count`` full blocks; each covers all tokens up to its end.

        The first one covers the cache salt too (``v1/core/kv_cache_utils.py``, ``generate_block_hash_extra_keys``).
        """
        size = self._block_size
        for index in range(len(self._hashes), count):
            before = self._hashes[-1] if index else (self.cache_salt or "").encode()
            tokens = array("I", self.all_token_ids[index * size : (index + 1) * size])
            digest = hashlib.blake2b(before, digest_size=16, person=b"block" if index else b"first")
            digest.update(tokens.tobytes())
            self._hashes.append(digest.digest())
        return self._hashes
