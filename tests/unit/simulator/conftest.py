"""Fixtures of the simulator's tests."""

import itertools
import os
import socket
from collections.abc import Iterator

import pytest

from tests.unit.simulator.engines import stand_ins

_PORTS = itertools.count(21_000 + os.getpid() % 500 * 16, 2)


@pytest.fixture
def side_channel() -> Iterator[int]:
    """Makes engines possible in this process; the port and the one after it are for the side channels of two ranks."""
    with stand_ins():
        yield next(port for port in _PORTS if _free(port) and _free(port + 1))


def _free(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0
