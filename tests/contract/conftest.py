"""Every suite here runs against etcd in memory and against a real etcd."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from backhaul_common.clock import SystemClock
from backhaul_common.etcd import EtcdClient, EtcdOptions
from tests.fakes.clock import FakeClock
from tests.fakes.etcd import FakeEtcd


@dataclass(frozen=True, slots=True)
class Backend:
    """An etcd and its time."""

    etcd: Any
    clock: Any
    wait: Callable[[float], Awaitable[None]]
    """Lets seconds pass."""
    prefix: str
    """Cluster name that nobody else uses."""


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.etcd)])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    prefix = f"test-{uuid.uuid4().hex}"
    if request.param == "fake":
        clock = FakeClock()
        etcd = FakeEtcd(clock)

        async def wait(seconds: float) -> None:
            await clock.advance(seconds)
            etcd.expire()

        yield Backend(etcd, clock, wait, prefix)
        return
    process = request.getfixturevalue("shared_etcd")
    async with EtcdClient(EtcdOptions(endpoints=(process.endpoint,))) as client:
        yield Backend(client, SystemClock(), asyncio.sleep, prefix)
