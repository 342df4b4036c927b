"""The router with real registries on a real etcd."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_router.app import Running
from backhaul_router.core.nodes import NodeState
from tests.fakes.engine import FakeEngine
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.eventually import eventually
from tests.fakes.owner import FakeOwner
from tests.fakes.registry_process import Registry, running_registry
from tests.fakes.router_stack import CHAT, chat_body, router_for
from tests.fakes.streams import Joining, Publishing

pytestmark = pytest.mark.etcd


@dataclass
class Cluster:
    """Two registries, one prefill and one decode engine that joined through the first, and their owner."""

    registries: tuple[Registry, Registry]
    prefill: FakeEngine
    decode: FakeEngine
    owner: FakeOwner
    client: aiohttp.ClientSession
    decode_stream: Joining

    async def chat(self, router: Running, *contents: str, **fields: Any) -> tuple[int, str, str]:
        """Returns status, route and miss reason of a turn through one router."""
        url = f"http://127.0.0.1:{router.http_port}{CHAT}"
        async with self.client.post(url, json=chat_body(*contents, **fields)) as response:
            await response.read()
            headers = response.headers
            return response.status, headers.get("x-backhaul-route", ""), headers.get("x-backhaul-miss", "")

    def left(self, set_id: str, **fields: Any) -> list[pb.BlockSetPointer]:
        """Returns the pointers that the agent publishes after the last turn, and lets the owner hold the set."""
        params = self.decode.legs[-1].params
        assert params is not None
        label = params["backhaul"]
        self.owner.hold(set_id, engine_id=self.decode.engine_id, token_count=128)
        return [
            pb.BlockSetPointer(
                scope=label["scope"],
                key=key,
                set_id=set_id,
                engine_id=self.decode.engine_id,
                node_id="d1",
                token_count=128,
                digest=bytes(16),
                stride=64,
                identity=bytes(16),
                **fields,
            )
            for key in label["keys"]
        ]


def record(engine: FakeEngine, node_id: str, agent: str) -> pb.Node:
    role = pb.ROLE_PREFILL if engine.role == "prefill" else pb.ROLE_DECODE
    described = pb.Engine(engine_id=engine.engine_id, connector_version="0.1.0", reuse=True, block_size=16)
    return pb.Node(
        node_id=node_id,
        session=f"session-{node_id}",
        role=role,
        agent_address=agent,
        engine_url=engine.url,
        models=engine.models,
        engines=[described],
        state=pb.NODE_STATE_READY,
    )


@pytest.fixture
async def running(shared_etcd: EtcdProcess, cluster: str) -> AsyncIterator[Cluster]:
    async with (
        running_registry(shared_etcd.endpoint, cluster) as one,
        running_registry(shared_etcd.endpoint, cluster) as other,
        FakeEngine("prefill") as prefill,
        FakeEngine("decode") as decode,
        FakeOwner() as owner,
        aiohttp.ClientSession() as client,
        Joining(one.nodes) as prefill_stream,
        Joining(one.nodes) as decode_stream,
    ):
        await prefill_stream.join(record(prefill, "p1", "127.0.0.1:1"), ttl_s=60)
        await decode_stream.join(record(decode, "d1", owner.address), ttl_s=60)
        yield Cluster((one, other), prefill, decode, owner, client, decode_stream)


async def test_a_turn_left_through_one_router_and_registry_is_found_through_the_others(running: Cluster) -> None:
    one, other = running.registries
    async with router_for((one.address,)) as first, router_for((other.address,)) as second:
        await eventually(lambda: len(first.table) == len(second.table) == 2)
        assert await running.chat(first, "hi") == (200, "cold", "first_turn")
        async with Publishing(one.index) as publishing:
            await publishing.open("d1", running.decode.engine_id)
            await publishing.batch(upserts=running.left("set-1"))
            assert await running.chat(second, "hi", "hello", "more") == (200, "warm", "")
            assert await running.chat(first, "hi", "hello", "more") == (200, "cold", "claim:set_claimed")


async def test_a_router_serves_from_its_first_connection_on(running: Cluster) -> None:
    one, _ = running.registries
    for _ in range(5):
        async with router_for((one.address,)) as router:
            assert await running.chat(router, "hi") == (200, "cold", "first_turn")


async def test_a_router_starts_without_a_registry_and_says_that_it_is_not_ready(running: Cluster) -> None:
    async with (
        router_for(("127.0.0.1:1",)) as router,
        running.client.get(f"http://127.0.0.1:{router.http_port}/ready") as response,
    ):
        assert response.status == 503
        assert await response.json() == {"ready": False, "reason": "no nodes are known"}


async def test_the_next_turn_waits_for_a_publish_that_is_on_its_way(running: Cluster) -> None:
    one, _ = running.registries
    async with router_for((one.address,)) as router, Publishing(one.index) as publishing:
        await eventually(lambda: len(router.table) == 2)
        await publishing.open("d1", running.decode.engine_id)
        await running.chat(router, "hi")
        pointers = running.left("set-1")
        turn = asyncio.create_task(running.chat(router, "hi", "hello", "more"))
        await asyncio.sleep(0.05)
        await publishing.batch(upserts=pointers)
        assert await turn == (200, "warm", "")


async def test_a_node_that_leaves_takes_its_sets_with_it(running: Cluster) -> None:
    one, _ = running.registries
    async with router_for((one.address,)) as router, Publishing(one.index) as publishing:
        await eventually(lambda: len(router.table) == 2)
        await publishing.open("d1", running.decode.engine_id)
        await running.chat(router, "hi")
        await publishing.batch(upserts=running.left("set-1"))
        draining = record(running.decode, "d1", running.owner.address)
        draining.state = pb.NODE_STATE_DRAINING
        await running.decode_stream.send(update=pb.JoinNodeRequest.Update(node=draining))
        await running.decode_stream.send(leave=pb.JoinNodeRequest.Leave())
        await eventually(lambda: router.table.get("d1") is None)
        # Its engine answers all the same.
        assert await running.chat(router, "hi", "hello", "more") == (200, "cold", "owner_unavailable")


@pytest.mark.parametrize(("retiring", "status"), [(False, 200), (True, 503)], ids=["agent ends", "retiring"])
async def test_the_only_node_serves_on_while_its_agent_ends_unless_it_retires(
    running: Cluster, retiring: bool, status: int
) -> None:
    one, _ = running.registries
    async with router_for((one.address,)) as router:
        await eventually(lambda: len(router.table) == 2)
        draining = record(running.decode, "d1", running.owner.address)
        draining.state, draining.retiring = pb.NODE_STATE_DRAINING, retiring
        await running.decode_stream.send(update=pb.JoinNodeRequest.Update(node=draining))
        await eventually(lambda: _drains(router, "d1"))
        assert (await running.chat(router, "hi"))[0] == status
        await running.decode_stream.send(leave=pb.JoinNodeRequest.Leave())
        await eventually(lambda: router.table.get("d1") is None)
        assert (await running.chat(router, "hi"))[0] == status


def _drains(router: Running, node_id: str) -> bool:
    node = router.table.get(node_id)
    return node is not None and node.state is NodeState.DRAINING


async def test_a_registry_that_stops_costs_neither_turns_nor_reuse(running: Cluster) -> None:
    one, other = running.registries
    async with router_for((one.address, other.address)) as router, Publishing(other.index) as publishing:
        await eventually(lambda: len(router.table) == 2)
        await publishing.open("d1", running.decode.engine_id)
        await running.chat(router, "hi")
        await publishing.batch(upserts=running.left("set-1"))
        one.stopping.set()
        await one.ended
        assert await running.chat(router, "hi", "hello", "more") == (200, "warm", "")
