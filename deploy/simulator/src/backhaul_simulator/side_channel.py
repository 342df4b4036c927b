"""NIXL's handshake over ZMQ: who an engine is, where its memory is, and what its clock says.

The messages are vLLM's (``nixl/metadata.py``), the listener that of ``nixl/base_scheduler.py``
(``_nixl_handshake_listener``), the question that of ``nixl/base_worker.py`` (``_nixl_handshake``).
"""

import threading
import time
from dataclasses import dataclass, field

import msgspec
import zmq

GET_META_MSG = b"get_meta_msg"
_ANSWER_MS = 5000


@dataclass(frozen=True)
class NixlAgentMetadata:
    """What a reader learns of an engine: vLLM's names, with a transfer port in place of memory addresses."""

    engine_id: str
    agent_metadata: bytes
    num_blocks: int
    block_size: int
    transfer_port: int
    kv_caches_base_addr: list[int] = field(default_factory=list)
    device_id: int = 0
    block_lens: list[int] = field(default_factory=list)
    kv_cache_layout: str = "LBHNC"


@dataclass(frozen=True)
class NixlHandshakePayload:
    """The answer's first part. The hash is compared before the rest is looked at."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


class HandshakeError(Exception):
    """No answer, or one of another kind of engine."""


class HandshakeListener:
    """Answers handshakes on a thread of its own."""

    def __init__(self, host: str, port: int, payload: NixlHandshakePayload) -> None:
        """Listens at once. Raises zmq.ZMQError when the port is taken."""
        self._answer = msgspec.msgpack.encode(payload)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(_address(host, port))
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="nixl_handshake_listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        # The thread's receive fails, it closes the socket, and only then this returns.
        self._context.term()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                identity, empty, question = self._socket.recv_multipart()
                message, pp_rank, tp_rank = msgspec.msgpack.decode(question)
            except zmq.ContextTerminated:
                break
            except (ValueError, TypeError):
                continue
            if message != GET_META_MSG or (pp_rank, tp_rank) != (0, 0):
                continue
            clock = msgspec.msgpack.encode(time.perf_counter())
            self._socket.send_multipart((identity, empty, self._answer, clock))
        self._socket.close()


def handshake(host: str, port: int, *, compatibility_hash: str, engine_id: str) -> tuple[NixlAgentMetadata, float]:
    """Asks an engine who it is; returns that and (its clock - the own clock) in seconds. Blocks up to 5 s.

    Raises HandshakeError when it does not answer, is not compatible, or is another engine by now.
    """
    try:
        with zmq.Context() as context, context.socket(zmq.REQ) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.IPV6, 1)
            sock.setsockopt(zmq.RCVTIMEO, _ANSWER_MS)
            sock.connect(_address(host, port))
            sent = time.perf_counter()
            sock.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
            answer, clock = sock.recv_multipart()
            received = time.perf_counter()
        payload = msgspec.msgpack.decode(answer, type=NixlHandshakePayload)
        offset = msgspec.msgpack.decode(clock, type=float) - (sent + received) / 2
    except (zmq.ZMQError, ValueError) as error:
        raise HandshakeError(f"no handshake with {host}:{port}: {error}") from error
    if payload.compatibility_hash != compatibility_hash:
        raise HandshakeError(f"the engine at {host}:{port} is of an incompatible kind")
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    if metadata.engine_id != engine_id:
        raise HandshakeError(f"expected engine {engine_id} at {host}:{port}, found {metadata.engine_id}")
    return metadata, offset


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
