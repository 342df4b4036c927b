"""What an engine caches: the full blocks of its prefix cache, as its KV events tell.

A block is found by its place: the block before it, the cache salt (in the first block only) and its tokens. The engine
finds it by a hash of the same (vllm/v1/core/kv_cache_utils.py, ``hash_block_tokens``). Blocks that an adapter, an image
or prompt embeddings had part in are not kept: nobody asks for them here. What is kept may be less than what the engine
has, and for a moment more: whoever counts on it bounds what a wrong count costs.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_BLOCKS = 262_144
"""Blocks that are kept of one engine, about 250 B each; beyond it those stored first are forgotten."""

MEDIUM = "GPU"
"""Where blocks must be to be read; the engine says so on CPU too (vllm/v1/core/block_pool.py, ``medium``)."""

_WHOLE = ("full_attention", "mla_attention")
"""Kinds that need the blocks of a prefix and nothing else (vllm/v1/kv_cache_interface.py, `KVCacheSpecKind`)."""

BlockHash = bytes | int
"""vLLM's names for blocks; numbers with ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES``."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks in a row that the engine caches from now on."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    """The block before them; None at the start of a prompt."""
    token_ids: Sequence[int]
    block_size: int
    extra_keys: Sequence[Sequence[object] | None] | None = None
    """By block: what its hash covers besides tokens. A salt is a text, in a prompt's first block only."""
    adapter: str | None = None
    medium: str | None = MEDIUM
    group: int | None = 0
    kind: str | None = None
    """What is cached, by vLLM's name; None: not said."""
    session: str | None = None
    """The label that the request brought (``session_id``)."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that the engine has evicted."""

    hashes: Sequence[BlockHash]
    medium: str | None = MEDIUM
    group: int | None = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine has emptied its cache."""


Change = Stored | Removed | Cleared


class Cached:
    """The prefix cache of one engine."""

    def __init__(self, *, most_blocks: int = MAX_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._next = 0
        # By place, the block there; and back, those stored first at the head.
        self._at: dict[bytes, BlockHash] = {}
        self._place_of: OrderedDict[BlockHash, bytes] = OrderedDict()
        # Prompts that were computed side by side leave several blocks with one hash; each is stored and removed itself.
        self._more_copies: dict[BlockHash, int] = {}
        self.block_size = 0
        """Tokens per block; 0 until a block was stored."""
        self.countable = True
        """Whether a prefix is there when its blocks are: not with several cache groups, of which each has a part of it,
        nor with windows and states, of which only the end is kept."""

    def __len__(self) -> int:
        return len(self._place_of)

    def apply(self, sequence: int, changes: Sequence[Change]) -> bool:
        """Takes in one batch of events; False when batches before it were missed: all older knowledge is dropped."""
        complete = sequence == self._next
        if not complete:
            self.forget()
        self._next = sequence + 1
        for change in changes:
            match change:
                case Stored():
                    self._store(change)
                case Removed():
                    self._remove(change)
                case Cleared():
                    self._clear()
        return complete

    def forget(self) -> None:
        """Starts over: whatever comes next is the first that is known."""
        self._clear()
        self._next = 0
        self.block_size = 0
        self.countable = True

    def count(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Returns how many leading tokens of a prompt the engine caches: whole blocks, and never the last token.

        The last token of a prompt is always computed: the next one comes from it (``get_computed_blocks``).
        """
        size = self.block_size
        if not size or not self.countable:
            return 0
        parent: BlockHash | None = None
        end = 0
        while end + size < len(token_ids):
            found = self._at.get(_place(parent, salt if parent is None else "", token_ids[end : end + size]))
            if found is None:
                break
            parent, end = found, end + size
        return end

    def _store(self, stored: Stored) -> None:
        if stored.group or stored.kind not in (None, *_WHOLE):
            self.countable = False
        if stored.medium != MEDIUM or stored.group or stored.adapter is not None or not stored.hashes:
            return
        size = stored.block_size
        if len(stored.token_ids) != size * len(stored.hashes) or (self.block_size not in (0, size)):
            return
        self.block_size = size
        parent = stored.parent
        for index, block in enumerate(stored.hashes):
            extra = stored.extra_keys[index] if stored.extra_keys and index < len(stored.extra_keys) else None
            salt = _salt(extra, first=parent is None)
            if salt is not None:
                self._put(block, _place(parent, salt, stored.token_ids[index * size : (index + 1) * size]))
            parent = block

    def _put(self, block: BlockHash, place: bytes) -> None:
        if block in self._place_of:
            self._more_copies[block] = self._more_copies.get(block, 0) + 1
            return
        self._at[place] = block
        self._place_of[block] = place
        while len(self._place_of) > self._most_blocks:
            self._drop(next(iter(self._place_of)))

    def _remove(self, removed: Removed) -> None:
        if removed.medium != MEDIUM or removed.group:
            return
        for block in removed.hashes:
            if copies := self._more_copies.pop(block, 0):
                if copies > 1:
                    self._more_copies[block] = copies - 1
            else:
                self._drop(block)

    def _drop(self, block: BlockHash) -> None:
        self._more_copies.pop(block, None)
        place = self._place_of.pop(block, None)
        if place is not None and self._at.get(place) == block:
            del self._at[place]

    def _clear(self) -> None:
        self._at.clear()
        self._place_of.clear()
        self._more_copies.clear()


def _salt(extra: Sequence[object] | None, *, first: bool) -> str | None:
    """Returns the salt of a block, empty without one; None for a block whose hash covers anything else."""
    if not extra:
        return ""
    if first and len(extra) == 1 and isinstance(extra[0], str):
        return extra[0]
    return None


def _place(parent: BlockHash | None, salt: str, token_ids: Sequence[int]) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in (_raw(parent), salt.encode("utf-8", "surrogatepass")):
        state.update(len(part).to_bytes(4, "big") + part)
    state.update(array("i", token_ids).tobytes())
    return state.digest()


def _raw(block: BlockHash | None) -> bytes:
    if block is None:
        return b""
    return b"b" + block if isinstance(block, bytes) else b"i" + str(block).encode()
