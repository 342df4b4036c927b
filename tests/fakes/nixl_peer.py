"""Speaks to an engine's side channel and, over NIXL, to its worker: handshakes, releases and renews by hand."""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq


class NixlApi(Protocol):
    """The module that makes NIXL agents: NIXL's own, or what simulated engines have in its place."""

    nixl_agent: Any
    nixl_agent_config: Any


@dataclass(frozen=True, slots=True)
class Handshake:
    """What an engine's side channel answered."""

    payload: dict[str, Any]
    metadata: dict[str, Any]
    """The part of the payload that is a message of its own."""
    clock: float
    """The engine's `perf_counter`."""


def shake_hands(host: str, port: int) -> Handshake:
    """Asks an engine's side channel, as other engines do."""
    with zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, 5000)
        sock.connect(f"tcp://{host}:{port}")
        sock.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
        first, clock = sock.recv_multipart()
    payload = msgspec.msgpack.decode(first)
    metadata = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
    return Handshake(payload, metadata, msgspec.msgpack.decode(clock))


class NixlPeer:
    """A NIXL agent that knows one engine."""

    def __init__(self, api: NixlApi, host: str, side_channel_port: int) -> None:
        metadata = shake_hands(host, side_channel_port).metadata
        self._agent = api.nixl_agent("test", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._engine = self._agent.add_remote_agent(metadata["agent_metadata"])

    def release(self, set_id: str) -> None:
        """Frees a set."""
        self._send(f"{set_id}:1")

    def renew(self, set_id: str) -> None:
        """Moves a set's deadline to now + 2/3 of the engine's lease duration, if that is later."""
        self._send(f"HB:{set_id}")

    def close(self) -> None:
        """Closes a simulated one; NIXL closes its own when they are deleted."""
        if hasattr(self._agent, "close"):
            self._agent.close()

    def _send(self, message: str) -> None:
        self._agent.send_notif(self._engine, message.encode())
        # Without NIXL's progress thread a message leaves only while someone polls.
        deadline = time.monotonic() + 0.1
        while time.monotonic() < deadline:
            self._agent.get_new_notifs()
            time.sleep(0.001)
