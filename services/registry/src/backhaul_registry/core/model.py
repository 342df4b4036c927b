"""What the registry keeps: nodes with their engines, and pointers to block sets."""

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a node does."""

    PREFILL = "prefill"
    DECODE = "decode"


class NodeState(Enum):
    """Whether a node may be given work."""

    NOT_READY = "not-ready"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One data-parallel rank of one vLLM server, in one incarnation."""

    engine_id: str
    rank: int = 0
    compatibility_hash: str = ""
    weights_digest: str = ""
    block_size: int = 0
    block_count: int = 0
    retention_ttl_s: float = 0.0
    connector_version: str = ""
    reuse: bool = False
    reuse_problem: str = ""
    vllm_version: str = ""
    second_chance: bool = False
    fenced: bool = False
    tp_size: int = 0
    kv_head_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One vLLM server with its agent."""

    node_id: str
    session: str
    role: Role
    agent_address: str
    engine_url: str
    models: tuple[str, ...] = ()
    engines: tuple[Engine, ...] = ()
    state: NodeState
    state_reason: str = ""
    retiring: bool = False
    """Whether its engine is not to be used any more once the node has left."""


@dataclass(frozen=True, slots=True)
class PointerId:
    """What tells one pointer from another."""

    scope: str
    key: str
    set_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Who to ask for a block set."""

    scope: str
    key: str
    set_id: str
    engine_id: str
    node_id: str
    token_count: int
    digest: bytes
    stride: int
    identity: bytes
    cached: bool = False
    """Whether nothing is retained: the engine merely may still cache the blocks."""
    traceparent: str = ""
    """Names the span of the turn that left the blocks."""

    @property
    def id(self) -> PointerId:
        """What tells this pointer from another."""
        return PointerId(self.scope, self.key, self.set_id)
