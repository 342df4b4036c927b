"""Free ports of the loopback interface."""

import random
import socket

HOST = "127.0.0.1"

_FIRST, _LAST = 20000, 29999
"""Below the range from which Linux takes ports for outgoing connections: nobody takes one while an engine starts."""


class Ports:
    """Hands out ports that are free now, none twice."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._draw = random.SystemRandom()

    def take(self, preferred: int | None = None) -> int:
        """Returns ``preferred`` when it is free, else a random free port."""
        if preferred is not None and self._free(preferred):
            return self._give(preferred)
        while not self._free(port := self._draw.randint(_FIRST, _LAST)):
            pass
        return self._give(port)

    def take_row(self, count: int) -> int:
        """Returns the first of ``count`` free ports in a row."""
        while True:
            first = self._draw.randint(_FIRST, _LAST)
            row = range(first, first + count)
            if all(map(self._free, row)):
                self._given.update(row)
                return first

    def _give(self, port: int) -> int:
        self._given.add(port)
        return port

    def _free(self, port: int) -> bool:
        if port in self._given:
            return False
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                return False
        return True
