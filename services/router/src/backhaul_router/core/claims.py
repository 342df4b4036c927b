"""Claims and grants of block sets, fresh handles, and the names under which engines keep blocks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim to make."""

    address: str
    """Agent of the node that holds the block set."""
    request_id: str
    set_id: str
    engine_id: str
    scope: str
    weights_digest: str
    """Of the prefill engine that will read."""


@dataclass(frozen=True, slots=True)
class Harvest:
    """A fresh handle to ask for."""

    address: str
    """Agent of the node whose engine may still cache the blocks."""
    set_id: str
    engine_id: str
    scope: str
    weights_digest: str
    """Of the prefill engine that will read."""
    model: str
    cache_salt: str
    token_ids: Sequence[int]
    """All of the prompt."""


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """What an engine keeps for one reader: a prefill engine for decode, or the other way round by a fresh handle."""

    address: str
    """Agent of the node that keeps them."""
    engine_id: str
    hand_off_id: str


@dataclass(frozen=True, slots=True)
class Released:
    """What became of block sets that nobody needs any more."""

    released: int = 0
    """Told to the engine."""
    deferred: int = 0
    """Being read, or may be: released once that is over."""


@dataclass(frozen=True, slots=True)
class HeldSet:
    """A block set as its owner sees it."""

    set_id: str
    engine_id: str
    state: str
    """`fenced`, `held`, `claimed` or `releasing`."""
    token_count: int
    block_count: int
    remaining_s: float
    """Until the deadline that the engine confirmed last."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks that one prefill leg may read, and no other."""

    source: Claim | KeptBlocks
    """Where they come from: to be given back when nothing reads them."""
    handle: str
    """kv_transfer_params for the prefill leg, a JSON object."""
    token_count: int

    @property
    def cached(self) -> bool:
        """Whether the handle was made for this turn alone, from what an engine still cached."""
        return isinstance(self.source, KeptBlocks)
