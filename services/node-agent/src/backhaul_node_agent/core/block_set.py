"""What an engine retains after a turn, and what is known of the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BlockSet:
    """A block set as the connector reported it; never changes."""

    set_id: str
    scope: str
    keys: tuple[str, ...]
    params: Mapping[str, Any]
    """vLLM's kv_transfer_params."""
    token_count: int
    block_count: int
    identity: bytes
    stride: int
    spacing: int
    anchors: bytes
    cached: bool = False
    """Whether nothing is retained any more: what the pointer to it leads to is merely likely (`second_chance`)."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a connector says of its engine when it connects."""

    engine_id: str
    rank: int
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
