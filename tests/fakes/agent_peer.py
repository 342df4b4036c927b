"""The agent's end of a connector's socket, for tests of real engines: records all, answers what it must."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from backhaul_connector import wire

M = TypeVar("M", bound=wire.FromConnector)


class AgentPeer:
    """Listens on the socket; one thread per connection. ``messages`` holds what came on any connection, in order."""

    def __init__(self, path: Path, session: str = "peer") -> None:
        self.path = path
        self.session = session
        self.messages: list[wire.FromConnector] = []
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.vanish()

    def listen(self) -> None:
        """Takes the socket's path and accepts connections."""
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def vanish(self) -> None:
        """Closes everything, as a killed agent does."""
        if self._listener is not None:
            # shutdown() wakes the thread in accept(); close() alone would leave it there.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.path.unlink(missing_ok=True)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def send(self, message: wire.FromAgent) -> None:
        """Sends on the newest connection."""
        self._connections[-1].sendall(wire.encode(message))

    def count(self, kind: type[M]) -> int:
        """Returns how many messages of a kind came so far."""
        return sum(isinstance(message, kind) for message in self.messages)

    def wait(
        self, kind: type[M], *, after: int = 0, timeout_s: float = 10, where: Callable[[M], bool] | None = None
    ) -> M:
        """Returns the first message of a kind after the first ``after`` of all messages that ``where`` accepts.

        Raises AssertionError when none came in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for message in self.messages[after:]:
                    if isinstance(message, kind) and (where is None or where(message)):
                        return message
                remaining = deadline - time.monotonic()
                assert remaining > 0, f"no {kind.__name__} within {timeout_s} s; had {self.messages[after:]}"
                self._changed.wait(remaining)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        stopped = threading.Event()
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            for line in lines:
                message = wire.decode_from_connector(line)
                if isinstance(message, wire.Hello):
                    connection.sendall(wire.encode(wire.Welcome(protocol=wire.PROTOCOL_VERSION, session=self.session)))
                    threading.Thread(target=self._ping, args=(connection, stopped), daemon=True).start()
                with self._changed:
                    self.messages.append(message)
                    self._changed.notify_all()
        stopped.set()

    def _ping(self, connection: socket.socket, stopped: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while not stopped.wait(1.0):
                connection.sendall(wire.encode(wire.Ping(token=time.monotonic())))
