"""A connector without an engine: retains as many block sets as are wanted and says what an agent must hear."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backhaul_connector import wire
from backhaul_connector.anchors import AnchorChain, Anchors
from benchmarks.registry.pointers import SCOPE, key_of, pointer_of

ENGINE = "engine-without-engine"
WEIGHTS = "weights"
TOKENS = 4_096
"""Of each set."""

_BLOCK_SIZE = 64
_BLOCKS = TOKENS // _BLOCK_SIZE
_TTL_S = 3_600.0
_IDENTITY = bytes(16)
_FIRST = 1 << 41
"""Number of the first set: nobody else publishes these."""


def set_of(number: int) -> str:
    """Returns the id of a set."""
    return pointer_of(_FIRST + number).set_id


def key_to(number: int) -> str:
    """Returns the lookup key of a set."""
    return key_of(_FIRST + number)


@asynccontextmanager
async def connected(socket: Path, set_count: int) -> AsyncIterator[None]:
    """Holds so many sets, at the agent of this socket, until left."""
    reader, writer = await asyncio.open_unix_connection(str(socket), limit=wire.MAX_LINE_BYTES)
    writer.write(wire.encode(_hello(set_count)))
    task = asyncio.create_task(_converse(reader, writer, set_count))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        writer.transport.abort()


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, set_count: int) -> None:
    while line := await reader.readline():
        match wire.decode_from_agent(line):
            case wire.Welcome():
                chain = AnchorChain(_IDENTITY, _BLOCK_SIZE)
                chain.extend(range(TOKENS))
                anchors = Anchors.of(chain, _IDENTITY)
                for number in range(set_count):
                    writer.write(wire.encode(wire.Retained(set=_report(number, anchors), replayed=True)))
                    await writer.drain()
                writer.write(wire.encode(wire.Replayed(set_count=set_count)))
            case wire.Ping(token=token):
                writer.write(wire.encode(wire.Pong(token=token, now=time.perf_counter(), dropped_count=0)))
            case _:
                pass


def _hello(set_count: int) -> wire.Hello:
    return wire.Hello(
        protocol=wire.PROTOCOL_VERSION,
        engine_id=ENGINE,
        rank=1,
        connector_version="0.1.0",
        vllm_version="0.32.0",
        weights_digest=WEIGHTS,
        block_size=_BLOCK_SIZE,
        block_count=4 * set_count * _BLOCKS,
        tp_size=1,
        ttl_s=_TTL_S,
        lease_s=180.0,
        recompute_threshold=64,
        side_channel_host="127.0.0.1",
        side_channel_port=1,
        now=time.perf_counter(),
    )


def _report(number: int, anchors: Anchors) -> wire.BlockSetReport:
    now = time.perf_counter()
    deadline = now + _TTL_S
    set_id = set_of(number)
    first = number * _BLOCKS
    return wire.BlockSetReport(
        set_id=set_id,
        scope=SCOPE,
        keys=[key_to(number)],
        # As vLLM's scheduler makes them (nixl/pull_scheduler.py, ``request_finished``).
        params={
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [list(range(first, first + _BLOCKS))],
            "remote_engine_id": ENGINE,
            "remote_request_id": set_id,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
            "remote_num_tokens": TOKENS,
            "remote_blocks_expiry_time": deadline,
        },
        token_count=TOKENS,
        block_count=_BLOCKS,
        identity=anchors.identity,
        stride=anchors.stride,
        spacing=anchors.spacing,
        anchors=anchors.digests,
        deadline=deadline,
        ended_at=now,
        turn_s=1.0,
    )
