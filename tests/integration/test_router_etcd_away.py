"""What routers and their operators see while etcd is away or slow, and the registry before it is neither."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from backhaul_registry import instruments as of_registry
from backhaul_router import instruments as of_router
from backhaul_router.app import Running
from tests.fakes.engine import FakeEngine
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.eventually import eventually
from tests.fakes.proxy import Proxy
from tests.fakes.readings import Readings
from tests.fakes.registry_process import Registry, running_registry
from tests.fakes.router_stack import CHAT, chat_body, router_for
from tests.fakes.streams import Joining
from tests.integration.test_router_registry import record

pytestmark = pytest.mark.etcd

CONSOLE = {"listen_console": "127.0.0.1:0"}

PATIENT: dict[str, Any] = {"lookup_budget_s": 3.0, **CONSOLE}
"""More than a registry itself waits for etcd."""


@pytest.fixture
def link(own_etcd: EtcdProcess) -> Iterator[Proxy]:
    """What lies between the registry and etcd."""
    with Proxy(own_etcd.endpoint) as link:
        yield link


@pytest.fixture
async def registry(link: Proxy, cluster: str, read: Readings) -> AsyncIterator[Registry]:
    """A registry at which a prefill and a decode node have joined, both gone from etcd only after the test."""
    async with (
        running_registry(link.address, cluster) as registry,
        FakeEngine("prefill") as prefill,
        FakeEngine("decode") as decode,
        Joining(registry.nodes) as one,
        Joining(registry.nodes) as other,
    ):
        await one.join(record(prefill, "p1", "127.0.0.1:1"), ttl_s=60)
        await other.join(record(decode, "d1", "127.0.0.1:1"), ttl_s=60)
        yield registry


async def told(router: Running) -> tuple[bool, list[str]]:
    """Returns what a router's console says of the registry, and the problems that it names."""
    url = f"http://127.0.0.1:{router.console_port}/console/api/state"
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        changes = (await response.json())["changes"]
    return changes["registry"], [problem["text"].partition(":")[0] for problem in changes["problems"]]


async def chat(router: Running) -> tuple[int, str, str]:
    """Returns status, route and miss reason of a turn that goes on from an earlier one."""
    url = f"http://127.0.0.1:{router.http_port}{CHAT}"
    body = chat_body("hi", "hello", "more")
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as response:
        await response.read()
        headers = response.headers
        return response.status, headers["x-backhaul-route"], headers["x-backhaul-miss"]


async def says_away(router: Running) -> bool:
    """Tells whether a router's console says that the registry does not answer, before all else."""
    registry_answers, problems = await told(router)
    return (registry_answers, problems[:1]) == (False, ["no registry answers"])


async def test_an_etcd_that_is_killed_shows_at_registry_router_and_console_until_it_is_back(
    registry: Registry, own_etcd: EtcdProcess, read: Readings
) -> None:
    def gauges() -> tuple[float, float]:
        return read.of(of_router.REGISTRY_WATCH)[()], read.of(of_registry.WATCH_FOLLOWS)["nodes",]

    async with router_for((registry.address,), **PATIENT) as router:
        await eventually(lambda: len(router.table) == 2)
        assert gauges() == (1, 1)
        own_etcd.kill()
        await eventually(lambda: gauges() == (0, 0), 15)
        await eventually(lambda: says_away(router), 15)
        # The registry is still there, and the router asks it again and again.
        for _ in range(10):
            await asyncio.sleep(0.1)
            assert gauges() == (0, 0)
        assert await says_away(router)
        assert len(router.table) == 2
        assert await chat(router) == (200, "cold", "registry_unavailable")
        own_etcd.start()
        await eventually(lambda: gauges() == (1, 1), 15)
        assert (await told(router))[0]


async def test_a_router_that_starts_while_etcd_is_away_serves_the_nodes_that_were_listed_last_and_says_so(
    registry: Registry, own_etcd: EtcdProcess, read: Readings
) -> None:
    await eventually(lambda: read.of(of_registry.NODES)["ready",] == 2)
    own_etcd.kill()
    await eventually(lambda: read.of(of_registry.WATCH_FOLLOWS)["nodes",] == 0, 15)
    async with router_for((registry.address,), **PATIENT) as router:
        assert len(router.table) == 2
        assert await chat(router) == (200, "cold", "registry_unavailable")
        await eventually(lambda: says_away(router))


async def test_an_etcd_that_is_too_slow_for_the_lookup_budget_is_not_taken_for_one_that_is_away(
    registry: Registry, link: Proxy
) -> None:
    async with router_for((registry.address,), lookup_budget_s=0.05, **CONSOLE) as router:
        await eventually(lambda: len(router.table) == 2)
        link.delay_s = 0.04
        assert {await chat(router) for _ in range(3)} == {(200, "cold", "lookup_timeout")}
        assert (await told(router))[0]
