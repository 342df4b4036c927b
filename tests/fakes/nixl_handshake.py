"""A NIXL side channel: answers the handshake as `nixl/base_scheduler.py` (`_nixl_handshake_listener`) does."""

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio


class FakeHandshake:
    """Listens on a port of 127.0.0.1."""

    def __init__(
        self, context: zmq.asyncio.Context, *, engine_id: str = "engine-1", agent_metadata: bytes = b"m"
    ) -> None:
        self.engine_id = engine_id
        self.agent_metadata = agent_metadata
        self.silent = False
        self.garbage = False
        self.asked: list[object] = []
        self._socket = context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._socket.close(linger=0)

    async def _serve(self) -> None:
        while True:
            identity, _, message = await self._socket.recv_multipart()
            self.asked.append(msgspec.msgpack.decode(message))
            if not self.silent:
                now = msgspec.msgpack.encode(time.perf_counter())
                await self._socket.send_multipart((identity, b"", b"\xc1" if self.garbage else self._payload(), now))

    def _payload(self) -> bytes:
        metadata = {
            "engine_id": self.engine_id,
            "agent_metadata": self.agent_metadata,
            "kv_caches_base_addr": [1, 2],
            "num_blocks": 1000,
            "block_size": 32,
            "attn_backend_name": "CPU_ATTN",
        }
        return msgspec.msgpack.encode(
            {"compatibility_hash": "compatible", "agent_metadata_bytes": msgspec.msgpack.encode(metadata)}
        )
