"""An agent that a connector talks to: it reads what it is told, or nothing. A process of its own, needs msgspec only.

python -m benchmarks.connector.peer SOCKET reads|stalls
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

from backhaul_connector import wire

_PING_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Serves one connector after the other until it is killed."""
    path, manner = argv
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                _serve(connection, reads=manner == "reads")


def _serve(connection: socket.socket, *, reads: bool) -> None:
    lines = connection.makefile("rb")
    lines.readline()
    connection.sendall(wire.encode(wire.Welcome(protocol=wire.PROTOCOL_VERSION, session="benchmark")))
    if reads:
        threading.Thread(target=_read, args=(connection,), daemon=True).start()
    while True:
        connection.sendall(wire.encode(wire.Ping(token=time.perf_counter())))
        time.sleep(_PING_S)


def _read(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(1 << 20):
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
