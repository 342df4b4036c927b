"""Speaks NIXL to an engine from the test itself: releases and renews by hand."""

import time

import msgspec
import zmq
from nixl import _api as nixl


class NixlPeer:
    """A NIXL agent that knows one engine."""

    def __init__(self, host: str, side_channel_port: int) -> None:
        with zmq.Context() as context, context.socket(zmq.REQ) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVTIMEO, 5000)
            sock.connect(f"tcp://{host}:{side_channel_port}")
            sock.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            payload, _ = sock.recv_multipart()
        metadata = msgspec.msgpack.decode(msgspec.msgpack.decode(payload)["agent_metadata_bytes"])
        self._agent = nixl.nixl_agent("test", nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._engine = self._agent.add_remote_agent(metadata["agent_metadata"])

    def release(self, set_id: str) -> None:
        """Frees a set."""
        self._send(f"{set_id}:1")

    def renew(self, set_id: str) -> None:
        """Moves a set's deadline to now + 2/3 of the engine's lease duration, if that is later."""
        self._send(f"HB:{set_id}")

    def _send(self, message: str) -> None:
        self._agent.send_notif(self._engine, message.encode())
        # Without NIXL's progress thread a message leaves only while someone polls.
        deadline = time.monotonic() + 0.1
        while time.monotonic() < deadline:
            self._agent.get_new_notifs()
            time.sleep(0.001)
