"""vLLM's NIXL side channel: a ROUTER socket that answers handshakes with metadata and a clock."""

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import zmq


def handshake_payload(
    engine_id: str,
    agent_metadata: bytes = b"m",
    *,
    compatibility_hash: str = "compatible",
    num_blocks: int = 1000,
    block_size: int = 32,
) -> bytes:
    """Returns the first part of an answer (``nixl/metadata.py``, ``NixlHandshakePayload``)."""
    metadata = {
        "engine_id": engine_id,
        "agent_metadata": agent_metadata,
        "kv_caches_base_addr": [1, 2],
        "num_blocks": num_blocks,
        "block_size": block_size,
        "attn_backend_name": "CPU_ATTN",
    }
    return msgspec.msgpack.encode(
        {"compatibility_hash": compatibility_hash, "agent_metadata_bytes": msgspec.msgpack.encode(metadata)}
    )


class FakeSideChannel:
    """Answers as ``nixl/base_scheduler.py``, ``_nixl_handshake_listener``, does, from a thread of its own.

    Its engine's clock is ``clock_offset_s`` ahead of this process's.
    """

    def __init__(
        self, engine_id: str = "engine-1", *, agent_metadata: bytes = b"m", clock_offset_s: float = 0.0
    ) -> None:
        self.engine_id = engine_id
        self.parts: Sequence[bytes] | None = None
        """Answer in place of the right one; empty for none at all."""
        self.asked: list[object] = []
        self._agent_metadata = agent_metadata
        self._clock_offset_s = clock_offset_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-side-channel")
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._socket.poll(10):
                identity, _, request = self._socket.recv_multipart()
                self.asked.append(msgspec.msgpack.decode(request))
                parts = self._handshake() if self.parts is None else self.parts
                if parts:
                    self._socket.send_multipart([identity, b"", *parts])

    def _handshake(self) -> list[bytes]:
        now = msgspec.msgpack.encode(time.perf_counter() + self._clock_offset_s)
        return [handshake_payload(self.engine_id, self._agent_metadata), now]
