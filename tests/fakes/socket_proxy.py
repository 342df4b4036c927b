"""A Unix socket that passes everything on to another one, until it is cut."""

import contextlib
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class SocketProxy:
    """Listens on ``path``; ``target`` may be set, and change, later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target: Path | None = None
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> Self:
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Ends all connections; new ones are accepted."""
        pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                incoming, _ = self._listener.accept()
                outgoing = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    outgoing.connect(str(self.target))
                except OSError:
                    incoming.close()
                    outgoing.close()
                    continue
                self._pairs.append((incoming, outgoing))
                for source, sink in ((incoming, outgoing), (outgoing, incoming)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 * 1024):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        source.close()
