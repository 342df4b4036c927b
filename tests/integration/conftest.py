"""Fixtures for tests with a real etcd."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.registry_process import Registry, running_registry


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs routers on the loop that they have in earnest."""
    if item.path.stem.startswith("test_router"):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
def cluster() -> str:
    """A cluster name that no other test uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
async def registry(shared_etcd: EtcdProcess, cluster: str) -> AsyncIterator[Registry]:
    """A registry on the shared etcd."""
    async with running_registry(shared_etcd.endpoint, cluster) as replica:
        yield replica
