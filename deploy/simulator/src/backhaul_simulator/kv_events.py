"""KV events: what the prefix cache stores and evicts, told over ZMQ as vLLM 0.32 does (``distributed/kv_events.py``).

Names, order and tags of the fields are vLLM's. Left out: the replay socket, other media than the engine's own memory.
"""

import time
from collections.abc import Sequence

import msgspec
import zmq

_HIGH_WATER_MARK = 100_000
MEDIUM_GPU = "GPU"
FULL_ATTENTION = "full_attention"
"""The kind of the one cache group (`KVCacheSpecKind`)."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """An event; its tag is the name of its class."""


class BlockStored(KVCacheEvent):
    """Blocks in a row, known to the prefix cache from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks that the prefix cache has forgotten."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """The prefix cache is empty."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step changed."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def name_of(block_hash: bytes) -> int:
    """Returns the end of a hash as a number (``maybe_convert_block_hash``; vLLM's default)."""
    return int.from_bytes(block_hash[-8:], "big")


class KVEventPublisher:
    """The PUB socket of one rank (``ZmqEventPublisher``); sends from the caller's thread and never waits."""

    def __init__(self, endpoint: str, *, rank: int) -> None:
        """Binds ``endpoint`` (tcp://*:PORT), the port moved up by ``rank``. Raises zmq.ZMQError when it is taken."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._rank = rank
        self._sequence = 0
        base, _, port = endpoint.rpartition(":")
        try:
            self._socket.bind(f"{base}:{int(port) + rank}")
        except zmq.ZMQError:
            self.close()
            raise

    def publish(self, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Sends a batch."""
        batch = EventBatch(time.time(), list(events), self._rank)
        parts = (b"", self._sequence.to_bytes(8, "big"), msgspec.msgpack.encode(batch))
        self._sequence += 1
        self._socket.send_multipart(parts)

    def close(self) -> None:
        """Closes the socket."""
        self._context.destroy(linger=0)
