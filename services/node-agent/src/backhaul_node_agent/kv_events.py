"""Follows the KV events of the engines beside this agent: a ZMQ subscription per data-parallel rank.

vLLM publishes ``(topic, sequence, batch)`` (vllm/distributed/kv_events.py, ``ZmqEventPublisher``); rank n's port lies n
above the first. What was missed between two connections shows as a gap in the sequence, which `Cached` takes for a new
beginning; so is whatever cannot be read.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from backhaul_common.addresses import join_address
from backhaul_common.clock import Clock
from backhaul_node_agent.core.cached import BlockHash, Change, Cleared, Removed, Stored

_log = structlog.get_logger(__name__)

_MAX_BYTES = 64 * 1024 * 1024
"""Longest message: a prompt of a million tokens takes about 5 MB. A peer that sends more is cut off."""
_MAX_QUEUED = 10_000
"""Batches that may wait here. Beyond, ZMQ drops some, which shows as a gap."""
_RECONNECT_MS, _MOST_RECONNECT_MS = 100, 2_000
_PAUSE_S = 0.5
"""Between a connection that ended and the next one. ZMQ by itself never connects again after what it cannot read."""
_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_PING_MS, _SILENCE_MS = 2_000, 10_000
"""ZMQ's own heartbeats: a peer that vanished without a word is noticed."""

Hear = Callable[[int, int, Sequence[Change]], None]
"""Takes rank, sequence and changes of a batch."""

Lose = Callable[[int], None]
"""Takes the rank of which something could not be read."""


# What is read of vLLM's messages; fields that a later version adds at the end are ignored.
class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _BlockStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Tag(msgspec.Struct):
    type: str


_KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_TOKENS = range(2**31)
_batches = msgspec.msgpack.Decoder(_Batch)
_tags = msgspec.msgpack.Decoder(_Tag)
_events = msgspec.msgpack.Decoder(_BlockStored | _BlockRemoved | _AllBlocksCleared)


def read(parts: Sequence[bytes]) -> tuple[int, list[Change]]:
    """Reads a message: its sequence and what it changes. Events of kinds that are not known are left out.

    Raises ValueError for what vLLM does not send.
    """
    if len(parts) != 3 or len(parts[1]) != 8:
        raise ValueError("not a topic, a sequence and a batch")
    try:
        batch = _batches.decode(parts[2])
        changes = [_change(_events.decode(raw)) for raw in batch.events if _tags.decode(raw).type in _KNOWN]
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return int.from_bytes(parts[1], "big"), changes


def _change(event: _BlockStored | _BlockRemoved | _AllBlocksCleared) -> Change:
    match event:
        case _BlockStored():
            if event.block_size < 1 or any(token not in _TOKENS for token in event.token_ids):
                raise ValueError("blocks without a size, or token ids that no model has")
            return Stored(
                hashes=event.block_hashes,
                parent=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                extra_keys=event.extra_keys,
                adapter=event.lora_name,
                medium=event.medium,
                group=event.group_idx,
                kind=event.kv_cache_spec_kind,
                session=event.session_id,
            )
        case _BlockRemoved():
            return Removed(event.block_hashes, event.medium, event.group_idx)
        case _AllBlocksCleared():
            return Cleared()


class KvEvents:
    """The events of all ranks that are known."""

    def __init__(self, context: zmq.asyncio.Context, address: tuple[str, int], clock: Clock) -> None:
        """`address` is host and port of rank 0's events."""
        self._clock = clock
        self._context = context
        self._host, self._port = address
        # Holds no more than there are ranks.
        self._wanted: asyncio.Queue[int] = asyncio.Queue()
        self._ranks: set[int] = set()
        self._connected: set[int] = set()
        self._complaints: dict[int, str] = {}

    def connected(self, rank: int) -> bool:
        """Tells whether somebody is there who publishes."""
        return rank in self._connected

    def follow(self, rank: int) -> None:
        """Follows a rank from now on."""
        if rank not in self._ranks:
            self._ranks.add(rank)
            self._wanted.put_nowait(rank)

    async def run(self, hear: Hear, lose: Lose) -> None:
        """Follows until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._follow(await self._wanted.get(), hear, lose))

    async def _follow(self, rank: int, hear: Hear, lose: Lose) -> None:
        while True:
            try:
                with self._socket() as socket:
                    await self._attend(rank, socket, hear, lose)
            except zmq.ZMQError as error:
                _log.warning("KV events cannot be followed", rank=rank, error=str(error))
            finally:
                self._connected.discard(rank)
            await self._clock.sleep(_PAUSE_S)

    def _socket(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.RCVHWM, _MAX_QUEUED),
            (zmq.MAXMSGSIZE, _MAX_BYTES),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS),
            (zmq.HEARTBEAT_IVL, _PING_MS),
            (zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS),
        ):
            socket.setsockopt(option, value)
        socket.subscribe(b"")
        return socket

    async def _attend(self, rank: int, socket: zmq.asyncio.Socket, hear: Hear, lose: Lose) -> None:
        """Hears one publisher until its connection ends."""
        monitor = socket.get_monitor_socket(_ENDS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        receiving = asyncio.create_task(self._receive(rank, socket, hear, lose))
        watching = asyncio.create_task(self._watch(rank, monitor))
        try:
            socket.connect(f"tcp://{join_address(self._host, self._port + rank)}")
            done, _ = await asyncio.wait([receiving, watching], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            receiving.cancel()
            watching.cancel()
            await asyncio.wait([receiving, watching])
            socket.disable_monitor()
            monitor.close(linger=0)

    async def _receive(self, rank: int, socket: zmq.asyncio.Socket, hear: Hear, lose: Lose) -> None:
        while True:
            self._take(rank, await socket.recv_multipart(), hear, lose)
            # What has arrived already is received without a pause.
            await asyncio.sleep(0)

    def _take(self, rank: int, parts: Sequence[bytes], hear: Hear, lose: Lose) -> None:
        try:
            sequence, changes = read(parts)
        except ValueError as error:
            if self._complaints.get(rank) != str(error):
                self._complaints[rank] = str(error)
                _log.warning("KV events cannot be read", rank=rank, error=str(error)[:256])
            lose(rank)
            return
        hear(rank, sequence, changes)

    async def _watch(self, rank: int, monitor: zmq.asyncio.Socket) -> None:
        """Keeps note of whether the publisher is there; returns when it is no more."""
        while (await recv_monitor_message(monitor))["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected.add(rank)
            _log.info("KV events", rank=rank, port=self._port + rank, connected=True)
        _log.info("KV events", rank=rank, port=self._port + rank, connected=False)
