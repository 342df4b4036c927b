"""Fixtures of the simulator's tests."""

from collections.abc import Iterator

import pytest

from backhaul_local.ports import Ports
from tests.unit.simulator.engines import stand_ins

_PORTS = Ports()


@pytest.fixture
def side_channel() -> Iterator[int]:
    """Makes engines possible in this process; the port and the one after it are for the side channels of two ranks."""
    with stand_ins():
        yield _PORTS.take_row(2)
