"""NIXL's notifications over TCP: the part of ``nixl._api`` that vLLM and the node agent use.

Like the real thing it acknowledges nothing and never blocks: what a peer does not take is lost. Nothing arrives unless
somebody calls `get_new_notifs`; there is no thread.
"""

import json
import selectors
import socket
from dataclasses import dataclass, field
from typing import Any

_CONNECT_S = 1.0
_RECV_BYTES = 65_536
_LENGTH_BYTES = 4


class NixlError(RuntimeError):
    """A peer is not known, or cannot be reached."""


@dataclass
class nixl_agent_config:  # noqa: N801 - NIXL's own name
    """Configuration; only its names are NIXL's, and only host and ports matter here."""

    enable_prog_thread: bool = True
    enable_listen_thread: bool = False
    listen_host: str = "127.0.0.1"
    """Where notifications arrive, and what senders are told (the simulator's own)."""
    listen_port: int = 0
    """The same; 0: at any port."""
    advertised_port: int = 0
    """What senders are told in its place (the simulator's own); 0: the same."""
    capture_telemetry: bool = False
    num_threads: int = 0
    backends: list[str] = field(default_factory=lambda: ["UCX"])


class nixl_agent:  # noqa: N801 - NIXL's own name
    """One end of notifications. Its metadata says where it listens."""

    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config | None = None) -> None:
        self._name = agent_name
        conf = nixl_conf or nixl_agent_config()
        self._listener = socket.create_server((conf.listen_host, conf.listen_port), backlog=128)
        self._address = (conf.listen_host, conf.advertised_port or self._listener.getsockname()[1])
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._addresses: dict[str, tuple[str, int]] = {}
        self._outgoing: dict[str, socket.socket] = {}
        self._incoming: dict[socket.socket, bytearray] = {}
        self._names: dict[socket.socket, str] = {}

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `get_new_notifs` has something to do (the simulator's own)."""
        return self._selector.fileno()

    def get_agent_metadata(self) -> bytes:
        """Returns what `add_remote_agent` of a peer needs."""
        return json.dumps([self._name, *self._address]).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Makes a peer known and returns its name. Raises NixlError for metadata of something else."""
        try:
            name, host, port = json.loads(metadata)
        except ValueError as error:
            raise NixlError(f"metadata that cannot be read: {error}") from error
        self._drop(name)
        self._addresses[name] = (host, port)
        return str(name)

    def remove_remote_agent(self, agent: str) -> None:
        """Forgets a peer."""
        self._addresses.pop(agent, None)
        self._drop(agent)

    def check_remote_metadata(self, agent: str, descs: Any = None) -> bool:
        """Tells whether a peer is known."""
        return agent in self._addresses

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: str | None = None) -> None:
        """Sends a message; it is lost when the peer's buffers are full.

        Raises NixlError when the peer is not known or does not listen any more.
        """
        frame = len(notif_msg).to_bytes(_LENGTH_BYTES, "big") + notif_msg
        try:
            sock = self._outgoing.get(remote_agent_name) or self._connect(remote_agent_name)
            if sock.send(frame) != len(frame):
                # Half a message would garble all that follow it.
                self._drop(remote_agent_name)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(remote_agent_name)
            raise NixlError(f"{remote_agent_name} cannot be reached: {error}") from error

    def get_new_notifs(self, backends: list[str] | None = None) -> dict[str, list[bytes]]:
        """Returns what has arrived since the last call, by the name of the sender."""
        notifs: dict[str, list[bytes]] = {}
        while ready := self._selector.select(timeout=0):
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._receive(key.fileobj, notifs)
        return notifs

    def close(self) -> None:
        """Closes everything (the simulator's own: NIXL does it when the agent is deleted)."""
        for sock in (self._listener, *self._outgoing.values(), *self._incoming):
            sock.close()
        self._selector.close()

    def _connect(self, name: str) -> socket.socket:
        address = self._addresses.get(name)
        if address is None:
            raise NixlError(f"no remote agent {name}")
        sock = socket.create_connection(address, timeout=_CONNECT_S)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = self._name.encode()
        sock.send(len(own).to_bytes(_LENGTH_BYTES, "big") + own)
        self._outgoing[name] = sock
        return sock

    def _drop(self, name: str) -> None:
        if (sock := self._outgoing.pop(name, None)) is not None:
            sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        self._incoming[sock] = bytearray()
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, sock: socket.socket, notifs: dict[str, list[bytes]]) -> None:
        try:
            data = sock.recv(_RECV_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(sock)
            del self._incoming[sock]
            self._names.pop(sock, None)
            sock.close()
            return
        buffer = self._incoming[sock]
        buffer += data
        while len(buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "big")
            if len(buffer) < end:
                break
            message = bytes(buffer[_LENGTH_BYTES:end])
            del buffer[:end]
            if sock not in self._names:
                self._names[sock] = message.decode()
            else:
                notifs.setdefault(self._names[sock], []).append(message)
