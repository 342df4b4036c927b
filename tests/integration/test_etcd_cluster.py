"""A registry and an agent on an etcd of three members that die, freeze, are cut off, and come back."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.contract.owner_node import agent_node
from tests.fakes.etcd_cluster import EtcdCluster
from tests.fakes.recovery import recovered
from tests.fakes.registry_process import running_registry
from tests.integration.system import System

pytestmark = pytest.mark.etcd


@dataclass
class OnCluster(System):
    """The same on three members."""

    etcd: EtcdCluster
    leader: int
    """Number of the member that leads at first, and that the registry uses at first."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def system(etcd: EtcdCluster, tmp_path: Path) -> AsyncIterator[OnCluster]:
    async with AsyncExitStack() as stack:
        leader = etcd.leader()
        endpoints = (etcd.endpoints[leader], *etcd.endpoints[:leader], *etcd.endpoints[leader + 1 :])
        replica = running_registry("", "cluster", etcd_endpoints=endpoints)
        registry = await stack.enter_async_context(replica)
        agent = await stack.enter_async_context(agent_node(tmp_path, registry.address, lease_ttl_s=10))
        system = OnCluster(registry, agent, etcd, leader)
        await system.begin()
        yield system


def lost_leases(logs: Sequence[Mapping[str, Any]]) -> int:
    return [str(log["event"]).partition(":")[0] for log in logs].count("lease lost")


async def test_the_leader_is_killed(system: OnCluster) -> None:
    with capture_logs() as logs:
        system.etcd.members[system.leader].kill()
        await system.works_again("leader killed", within_s=15)
        system.etcd.members[system.leader].start()
        await system.works_again("killed member back", within_s=15)
    assert lost_leases(logs) == 0


async def test_the_leader_freezes(system: OnCluster) -> None:
    frozen = system.etcd.members[system.leader]
    with capture_logs() as logs:
        frozen.pause()
        try:
            await system.works_again("leader frozen", within_s=15)
        finally:
            frozen.resume()
        await system.works_again("frozen member back", within_s=15)
    assert lost_leases(logs) == 0


async def test_the_member_in_use_is_cut_off_from_the_others(system: OnCluster, tmp_path: Path) -> None:
    # Cut off, that member still takes calls and holds watches; it must be left.
    with capture_logs() as logs:
        system.etcd.isolate(system.leader)
        await system.works_again("member isolated", within_s=15)
        settings: dict[str, Any] = {"node_id": "node-2", "lease_ttl_s": 10}
        async with agent_node(tmp_path / "2", system.registry.address, **settings) as newcomer:
            await newcomer.connector.connect()

            async def seen() -> bool:
                return sorted(node.node_id for node in await system.watched()) == ["node-1", "node-2"]

            await recovered("member isolated: a new node is watched", seen, within_s=15)
        system.etcd.reunite()
        await system.works_again("isolated member back", within_s=15)
    assert lost_leases(logs) == 0


async def test_all_members_freeze_for_longer_than_leases_live(system: OnCluster) -> None:
    for member in system.etcd.members:
        member.pause()
    try:
        frozen = time.monotonic()

        async def refused() -> bool:
            return await system.agent.refusal("other", request_id=uuid.uuid4().hex) == "LEASE_INVALID"

        # What may have lapsed is not granted, whether or not anybody could say so.
        await recovered("all members frozen: grants stop", refused, within_s=12)
        await asyncio.sleep(16 - (time.monotonic() - frozen))
    finally:
        for member in system.etcd.members:
            member.resume()
    await system.works_again("all members thawed", within_s=15)
