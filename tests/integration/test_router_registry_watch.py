"""How a router follows the nodes at a registry that stops and comes back."""

from collections.abc import AsyncIterator

import pytest

from backhaul_common.clock import SystemClock
from backhaul_router import instruments
from backhaul_router.core.nodes import NodeTable
from backhaul_router.registry_client import RegistryClient
from tests.fakes.directory import FakeDirectory
from tests.fakes.eventually import eventually
from tests.fakes.readings import Readings


@pytest.fixture
async def directory(no_leaks: None) -> AsyncIterator[FakeDirectory]:
    async with FakeDirectory() as directory:
        yield directory


async def test_the_nodes_are_followed_while_a_registry_tells_of_them_and_breaks_are_counted(
    directory: FakeDirectory, read: Readings
) -> None:
    client = RegistryClient((directory.address,), table=NodeTable(), clock=SystemClock())
    assert not client.follows
    async with client:
        await eventually(lambda: client.follows)
        assert read.counted(instruments.REGISTRY_BREAKS) == {}
        await directory.stop()
        await eventually(lambda: not client.follows)
        assert read.of(instruments.REGISTRY_BREAKS)[()] >= 1
        await directory.start()
        await eventually(lambda: client.follows, 10)


async def test_the_nodes_are_not_followed_before_any_registry_has_listed_them(
    directory: FakeDirectory, read: Readings
) -> None:
    await directory.stop()
    async with RegistryClient((directory.address,), table=NodeTable(), clock=SystemClock()) as client:
        await eventually(lambda: read.of(instruments.REGISTRY_BREAKS).get((), 0) >= 1)
        assert not client.follows
