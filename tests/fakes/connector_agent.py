"""The node agent's end of the connector's socket, driven step by step by a test."""

import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from backhaul_connector import wire

_TIMEOUT_S = 5.0


class FakeAgent:
    """Listens on a Unix socket; each `accept` gives the next connection. Waits at most 5 s for anything."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(_TIMEOUT_S)
        self._listener.bind(str(path))
        self._listener.listen()
        self._accepted: list[AgentConnection] = []

    def __enter__(self) -> "FakeAgent":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._accepted:
            connection.close()
        self._listener.close()

    def accept(self) -> "AgentConnection":
        """Returns the next connection, of which nothing has been read."""
        sock, _ = self._listener.accept()
        self._accepted.append(AgentConnection(sock))
        return self._accepted[-1]

    def welcome(self, session: str = "session") -> tuple["AgentConnection", wire.Hello, list[wire.FromConnector]]:
        """Accepts, welcomes, and returns the connection with its hello and its replay."""
        connection = self.accept()
        hello = connection.receive()
        assert isinstance(hello, wire.Hello)
        connection.send(wire.Welcome(protocol=wire.PROTOCOL_VERSION, session=session))
        return connection, hello, connection.receive_until(lambda message: isinstance(message, wire.Replayed))


class AgentConnection:
    """One connection of a connector."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.settimeout(_TIMEOUT_S)
        self._lines = sock.makefile("rb")

    def send(self, *messages: wire.FromAgent) -> None:
        """Writes messages in one piece."""
        self.send_raw(b"".join(map(wire.encode, messages)))

    def send_raw(self, data: bytes) -> None:
        """Writes bytes as they are."""
        self._sock.sendall(data)

    def receive(self) -> wire.FromConnector:
        """Returns the next message; fails the test when the connector closed the connection."""
        line = self._lines.readline()
        assert line.endswith(b"\n"), "the connector closed the connection"
        return wire.decode_from_connector(line)

    def receive_until(self, last: Callable[[wire.FromConnector], bool]) -> list[wire.FromConnector]:
        """Returns the messages up to and including the first for which ``last`` holds."""
        messages = [self.receive()]
        while not last(messages[-1]):
            messages.append(self.receive())
        return messages

    def read_to_end(self) -> None:
        """Reads until the connector closes the connection."""
        while self._lines.read1(65536):
            pass

    def close(self) -> None:
        """Closes the connection, read or not."""
        self._lines.close()
        self._sock.close()
