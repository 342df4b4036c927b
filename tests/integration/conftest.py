"""Fixtures for tests with a real etcd."""

import uuid
from collections.abc import AsyncIterator

import pytest

from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.registry_process import Registry, running_registry


@pytest.fixture
def cluster() -> str:
    """A cluster name that no other test uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
async def registry(shared_etcd: EtcdProcess, cluster: str) -> AsyncIterator[Registry]:
    """A registry on the shared etcd."""
    async with running_registry(shared_etcd.endpoint, cluster) as replica:
        yield replica
