"""vLLM's NIXL side channel: a ROUTER socket that answers handshakes with metadata and a clock."""

import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq

Parts = list[bytes]


def handshake_payload(engine_id: str) -> bytes:
    """Returns the first part of an answer (``nixl/metadata.py``, ``NixlHandshakePayload``)."""
    metadata = msgspec.msgpack.encode({"engine_id": engine_id, "agent_metadata": b"", "num_blocks": 8})
    return msgspec.msgpack.encode({"compatibility_hash": "h", "agent_metadata_bytes": metadata})


def handshake_answer(engine_id: str, clock_offset: float = 0.0) -> Parts:
    """Returns both parts, with a clock that is ``clock_offset`` seconds ahead of this process's."""
    return [handshake_payload(engine_id), msgspec.msgpack.encode(time.perf_counter() + clock_offset)]


class FakeSideChannel:
    """Answers as ``nixl/base_scheduler.py``, ``_nixl_handshake_listener``, does; ``answer`` makes the parts."""

    def __init__(self, answer: Callable[[], Parts]) -> None:
        self._answer = answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-side-channel")
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.requests: list[object] = []

    def __enter__(self) -> "FakeSideChannel":
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
                self.requests.append(msgspec.msgpack.decode(request))
                self._socket.send_multipart([identity, b"", *self._answer()])
