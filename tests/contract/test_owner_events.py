"""What the agent hears of engines that publish KV events, restart, or send what no engine sends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from backhaul_common.clock import SystemClock
from backhaul_local.ports import Ports
from backhaul_node_agent import kv_events
from backhaul_node_agent.core.cached import Change, Cleared, Removed, Stored
from backhaul_node_agent.kv_events import KvEvents
from tests.fakes.eventually import eventually

STORED = {
    "type": "BlockStored",
    "block_hashes": [b"1", b"2"],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [["salt"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "label",
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [b"1"], "medium": "GPU", "group_idx": 0}
CLEARED = {"type": "AllBlocksCleared"}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@dataclass
class Heard:
    """What reached the agent."""

    events: KvEvents
    batches: list[tuple[int, int, Sequence[Change]]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    async def meets(self, *ranks: int) -> None:
        await eventually(lambda: all(map(self.events.connected, ranks)))


class Publisher:
    """Publishes what it is told to."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://*:{port}")

    def send(self, sequence: int, *events: Any) -> None:
        self.send_parts(b"", sequence.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, list(events), 0]))

    def send_parts(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def publishing(port: int) -> Iterator[Publisher]:
    publisher = Publisher(port)
    try:
        yield publisher
    finally:
        publisher.close()


@contextlib.asynccontextmanager
async def listening(context: zmq.asyncio.Context, port: int, *ranks: int) -> AsyncIterator[Heard]:
    heard = Heard(KvEvents(context, ("127.0.0.1", port), SystemClock()))
    for rank in ranks:
        heard.events.follow(rank)
    running = asyncio.create_task(heard.events.run(lambda *batch: heard.batches.append(batch), heard.lost.append))
    try:
        yield heard
    finally:
        running.cancel()
        await asyncio.wait([running])


async def heard_of(heard: Heard, publisher: Publisher, *events: Any) -> Sequence[Change]:
    """Publishes one batch that is heard whole: a subscription takes a moment to arrive."""

    def arrives() -> bool:
        publisher.send(0, CLEARED)
        return bool(heard.batches)

    await eventually(arrives)
    heard.batches.clear()
    publisher.send(1, *events)
    await eventually(lambda: any(sequence == 1 for _, sequence, _ in heard.batches))
    return next(changes for _, sequence, changes in heard.batches if sequence == 1)


async def test_events_of_every_kind_are_heard(context: zmq.asyncio.Context) -> None:
    port = Ports().take()
    with publishing(port) as publisher:
        async with listening(context, port, 0) as heard:
            changes = await heard_of(heard, publisher, STORED, REMOVED, {"type": "Later", "what": 1}, CLEARED)
    assert changes == [
        Stored(
            hashes=[b"1", b"2"],
            parent=None,
            token_ids=[1, 2, 3, 4],
            block_size=2,
            extra_keys=[["salt"], None],
            kind="full_attention",
            session="label",
        ),
        Removed([b"1"]),
        Cleared(),
    ]


async def test_every_rank_has_a_port_of_its_own(context: zmq.asyncio.Context) -> None:
    port = Ports().take_row(2)
    with publishing(port), publishing(port + 1) as second:
        async with listening(context, port, 0) as heard:
            await heard.meets(0)
            assert not heard.events.connected(1)
            heard.events.follow(1)
            heard.events.follow(1)
            await heard.meets(0, 1)
            await heard_of(heard, second, STORED)
            assert {rank for rank, _, _ in heard.batches} == {1}


async def test_events_are_followed_once_there_are_file_descriptors_for_it(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_PAUSE_S", 0.01)
    port = Ports().take()
    context.set(zmq.MAX_SOCKETS, 3)
    others = [context.socket(zmq.REQ) for _ in range(3)]
    with publishing(port) as publisher, capture_logs() as logs:
        async with listening(context, port, 0) as heard:
            await eventually(lambda: any("Too many open files" in str(line) for line in logs))
            for other in others:
                other.close(linger=0)
            assert await heard_of(heard, publisher, CLEARED) == [Cleared()]


async def test_an_engine_that_restarts_is_heard_again(context: zmq.asyncio.Context) -> None:
    port = Ports().take()
    async with listening(context, port, 0) as heard:
        for _ in range(2):
            with publishing(port) as publisher:
                await heard.meets(0)
                await heard_of(heard, publisher, STORED)
            await eventually(lambda: not heard.events.connected(0))
            heard.batches.clear()


BAD = {
    "one-part": [b""],
    "short-sequence": [b"", b"1", msgspec.msgpack.encode([0.0, [], 0])],
    "not-msgpack": [b"", bytes(8), b"\xc1"],
    "not-a-batch": [b"", bytes(8), msgspec.msgpack.encode({"events": []})],
    "no-tag": [b"", bytes(8), msgspec.msgpack.encode([0.0, [{"block_hashes": []}], 0])],
    "a-text-for-tokens": [b"", bytes(8), msgspec.msgpack.encode([0.0, [{**STORED, "token_ids": "x"}], 0])],
    "a-token-below-zero": [b"", bytes(8), msgspec.msgpack.encode([0.0, [{**STORED, "token_ids": [-1] * 4}], 0])],
    "a-token-beyond-int32": [b"", bytes(8), msgspec.msgpack.encode([0.0, [{**STORED, "token_ids": [2**31] * 4}], 0])],
    "no-block-size": [b"", bytes(8), msgspec.msgpack.encode([0.0, [{**STORED, "block_size": 0}], 0])],
    "nested-without-end": [b"", bytes(8), b"\x91" * 100_000],
}


@pytest.mark.parametrize("parts", BAD.values(), ids=BAD)
async def test_what_no_engine_sends_is_lost_and_no_more(context: zmq.asyncio.Context, parts: list[bytes]) -> None:
    port = Ports().take()
    with publishing(port) as publisher:
        async with listening(context, port, 0) as heard:
            await heard_of(heard, publisher, CLEARED)
            publisher.send_parts(*parts)
            assert await heard_of(heard, publisher, STORED)
            assert heard.lost == [0]


async def test_a_message_that_is_far_too_long_ends_its_connection_and_no_more(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MAX_BYTES", 10_000)
    port = Ports().take()
    with publishing(port) as publisher:
        async with listening(context, port, 0) as heard:
            await heard_of(heard, publisher, CLEARED)
            publisher.send_parts(b"", bytes(8), bytes(20_000))
            heard.batches.clear()
            assert await heard_of(heard, publisher, STORED)
            assert heard.lost == [], "it was never read"
