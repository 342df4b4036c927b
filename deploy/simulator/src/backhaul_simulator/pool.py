"""The memory of one engine: a fixed number of blocks that hold KV content, and who may be given which of them.

Rules as in vLLM (``v1/core/block_pool.py``): block 0 is the null block; a freed block that the prefix cache knows joins
the end of the free queue, any other one its head; what is in a freed block stays there until it is written again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from backhaul_simulator.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, name_of
from backhaul_simulator.model import KV_BYTES


class BlockPool:
    """Blocks, their contents, their reference counts and the free queue."""

    def __init__(self, *, block_count: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_count = block_count
        self.block_bytes = block_size * KV_BYTES
        self.memory = bytearray(block_count * self.block_bytes)
        self.hashes: list[bytes | None] = [None] * block_count
        """By block: its hash in the prefix cache; None when that does not know it."""
        self.events: list[BlockStored | BlockRemoved | AllBlocksCleared] | None = None
        """What changed in the prefix cache since somebody last looked; None when nobody does."""
        self._references = [0] * block_count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, block_count))
        self._cached: dict[bytes, list[int]] = {}

    @property
    def free_count(self) -> int:
        """Blocks that can be given out; the prefix cache may know some of them."""
        return len(self._free)

    def get_num_free_blocks(self) -> int:
        """Returns `free_count`, by vLLM's name for connectors."""
        return len(self._free)

    def read(self, block_id: int) -> bytes:
        """Returns what is in a block, whoever it belongs to. Raises IndexError when there is no such block."""
        if not 0 <= block_id < self.block_count:
            raise IndexError(f"no block {block_id} of {self.block_count}")
        start = block_id * self.block_bytes
        return bytes(self.memory[start : start + self.block_bytes])

    def write(self, block_id: int, content: bytes, token: int = 0) -> None:
        """Writes content into a block, from its ``token`` on. Raises IndexError when it does not fit there."""
        offset = token * KV_BYTES
        if not 0 <= block_id < self.block_count or offset + len(content) > self.block_bytes:
            raise IndexError(f"{len(content)} bytes at token {token} do not fit into block {block_id}")
        start = block_id * self.block_bytes + offset
        self.memory[start : start + len(content)] = content

    def cached(self, block_hash: bytes) -> int | None:
        """Returns a block with this hash, if the prefix cache knows one."""
        found = self._cached.get(block_hash)
        return found[0] if found else None

    def is_free(self, block_id: int) -> bool:
        """Tells whether nothing refers to a block."""
        return block_id in self._free

    def take(self, count: int) -> list[int]:
        """Gives out blocks from the head of the free queue; the prefix cache forgets them.

        Raises ValueError when there are not so many.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._forget(block_id)
            self._references[block_id] = 1
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to blocks that the prefix cache found."""
        for block_id in block_ids:
            if not self._references[block_id]:
                del self._free[block_id]
            self._references[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops a reference to each of a request's blocks. The last ones are given out first (``free_blocks``)."""
        first = []
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, f"block {block_id} was freed twice"
            if self._references[block_id]:
                continue
            if self.hashes[block_id] is None:
                first.append(block_id)
            else:
                self._free[block_id] = None
        for block_id in reversed(first):
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Makes a full block known to the prefix cache; several blocks may have one hash."""
        if self.hashes[block_id] is None:
            self.hashes[block_id] = block_hash
            self._cached.setdefault(block_hash, []).append(block_id)

    def reset_cache(self) -> bool:
        """Forgets all hashes; does nothing and returns False while any block is in use (``reset_prefix_cache``)."""
        if len(self._free) != self.block_count - 1:
            return False
        self._cached.clear()
        self.hashes = [None] * self.block_count
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        return True

    def _forget(self, block_id: int) -> None:
        block_hash = self.hashes[block_id]
        if block_hash is None:
            return
        self.hashes[block_id] = None
        if self.events is not None:
            self.events.append(BlockRemoved([name_of(block_hash)], MEDIUM_GPU, group_idx=0))
        same = self._cached[block_hash]
        same.remove(block_id)
        if not same:
            del self._cached[block_hash]
