"""What an engine retains after a turn, and what is known of the engine."""

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BlockSet:
    """A block set as the connector reported it; never changes."""

    set_id: str
    scope: str
    keys: tuple[str, ...]
    params: Mapping[str, Any]
    """vLLM's kv_transfer_params, where there are `block_ids` without these."""
    token_count: int
    block_count: int
    identity: bytes
    stride: int
    spacing: int
    anchors: bytes
    cached: bool = False
    """Whether nothing is retained any more: what the pointer to it leads to is merely likely (`second_chance`)."""
    block_ids: tuple["array[int]", ...] = ()
    """The blocks, by cache group."""
    ended_at: float = 0.0
    """Engine's clock: when its turn ended."""
    turn_s: float = 0.0
    """How long its turn took."""
    continues: tuple[str, ...] = ()
    """Keys by which the turn before its turn was looked up."""
    traceparent: str = ""
    """Names the span of its turn; empty when the turn's trace was not recorded."""

    @property
    def all_block_ids(self) -> Collection[int]:
        """Blocks of all cache groups."""
        if len(self.block_ids) == 1:
            return self.block_ids[0]
        return [block for group in self.block_ids for block in group]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a connector says of its engine when it connects."""

    engine_id: str
    rank: int
    """Data-parallel rank."""
    connector_version: str
    vllm_version: str
    weights_digest: str
    """Empty while unknown."""
    block_size: int
    block_count: int
    tp_size: int
    ttl_s: float
    side_channel_host: str
    side_channel_port: int
    problem: str = ""
    """Why the engine cannot reuse blocks; empty when it can."""
    lease_s: float = 30.0
    """``kv_lease_duration``: a renewal keeps a set for two thirds of it."""
    kv_head_count: int = 0
    """KV heads that tensor-parallel ranks divide among them; 0 when unknown, or when they do not."""
