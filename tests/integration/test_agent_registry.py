"""An agent, the real registry and a real etcd."""

import asyncio
import contextlib
import uuid
from pathlib import Path

import grpc
import pytest

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_common.errors import BackhaulError
from tests.contract.owner_node import AgentNode, agent_node, reuses
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.eventually import eventually
from tests.fakes.registry_process import Registry, running_registry
from tests.fakes.streams import Watching

pytestmark = pytest.mark.etcd


async def nodes(registry: Registry) -> list[registry_pb2.Node]:
    """Returns the nodes in the directory."""
    return list((await registry.nodes.ListNodes(registry_pb2.ListNodesRequest(), timeout=2)).nodes)


async def ready(registry: Registry, other_than: str = "") -> None:
    """Waits until the node can reuse blocks, in another session than the one given."""

    async def holds() -> bool:
        return any(reuses(node) and node.session != other_than for node in await nodes(registry))

    await eventually(holds)


async def find(registry: Registry, key: str = "key-of-set-1") -> list[registry_pb2.BlockSetPointer]:
    """Looks a key up as a router does."""
    request = registry_pb2.FindBlockSetsRequest(scope="scope-1", keys=[key])
    return list((await registry.index.FindBlockSets(request, timeout=2)).pointers)


async def found(registry: Registry, count: int = 1, timeout_s: float = 5.0) -> None:
    """Waits until a key leads to so many sets."""

    async def holds() -> bool:
        return len(await find(registry)) == count

    await eventually(holds, timeout_s)


async def test_a_turn_is_found_claimed_returned_and_freed(tmp_path: Path, registry: Registry) -> None:
    async with agent_node(tmp_path, registry.address) as agent:
        await agent.connector.connect()
        await ready(registry)
        held = agent.connector.retain()
        await found(registry)

        (pointer,) = await find(registry)
        assert (pointer.node_id, pointer.engine_id, pointer.set_id) == ("node-1", "engine-1", "set-1")
        assert (pointer.token_count, pointer.stride) == (100, 64)
        assert (pointer.digest, pointer.identity) == (held.anchors[-16:], held.identity)

        await agent.claim()
        await found(registry, 0)
        await agent.stub.ReturnBlockSet(agent_pb2.ReturnBlockSetRequest(request_id="request-1"), timeout=2)
        await found(registry)
        agent.connector.free("set-1")
        await found(registry, 0)


async def test_the_directory_shows_the_engine(tmp_path: Path, registry: Registry) -> None:
    async with agent_node(tmp_path, registry.address, role="decode") as agent:
        await agent.connector.connect()
        await ready(registry)
        (node,) = await nodes(registry)
        assert (node.node_id, node.role, list(node.models)) == ("node-1", registry_pb2.ROLE_DECODE, ["model-1"])
        assert (node.agent_address, node.engine_url) == ("127.0.0.1:7201", agent.http.url)
        (engine,) = node.engines
        assert (engine.engine_id, engine.weights_digest, engine.reuse_problem) == ("engine-1", "weights-digest", "")
    assert await nodes(registry) == []


async def test_a_stopping_agent_says_so_and_is_gone_from_etcd_when_it_ends(
    tmp_path: Path, registry: Registry, shared_etcd: EtcdProcess, cluster: str
) -> None:
    async with agent_node(tmp_path, registry.address, drain_s=2.0) as agent:
        await agent.connector.connect()
        await ready(registry)
        agent.connector.retain()
        await found(registry)
        async with Watching(registry.nodes.WatchNodes(registry_pb2.WatchNodesRequest())) as watch:
            await watch.next()
            await agent.stop()
            # All of it: the node's record, its pointers, and what their stream wrote beside them.
            assert shared_etcd.etcdctl("get", "--prefix", f"/{cluster}/", "--keys-only").split() == []
            draining = await watch.next()
            assert [node.state for node in draining.change.upserts] == [registry_pb2.NODE_STATE_DRAINING]
            assert list((await watch.next()).change.removals) == ["node-1"]


async def test_every_set_of_many_can_be_found_soon(tmp_path: Path, registry: Registry) -> None:
    async with agent_node(tmp_path, registry.address) as agent:
        await agent.connector.connect()
        await ready(registry)
        for number in range(100):
            agent.connector.retain(f"set-{number}")
            async with asyncio.timeout(2):
                while not await find(registry, f"key-of-set-{number}"):
                    pass


async def test_an_agent_moves_to_the_other_registry_and_stays_joined(tmp_path: Path, shared_etcd: EtcdProcess) -> None:
    cluster = f"cluster-{uuid.uuid4()}"
    async with running_registry(shared_etcd.endpoint, cluster) as second:
        async with running_registry(shared_etcd.endpoint, cluster, grace_s=0.0) as first:
            agents = agent_node(tmp_path, first.address, second.address, lease_ttl_s=3)
            agent = await agents.__aenter__()
            await agent.connector.connect()
            await ready(first)
            agent.connector.retain()
            await found(first)
        try:
            await found(second)
            await ready(second)
            await agent.claim()
        finally:
            await agents.__aexit__(None, None, None)


async def test_an_agent_survives_etcd_and_publishes_again(tmp_path: Path, own_etcd: EtcdProcess) -> None:
    async with (
        running_registry(own_etcd.endpoint, "cluster", pointer_ttl_s=2) as registry,
        agent_node(tmp_path, registry.address, lease_ttl_s=2, lease_margin_s=0.2) as agent,
    ):
        await agent.connector.connect()
        await ready(registry)
        agent.connector.retain()
        await found(registry)

        own_etcd.pause()
        await _refused(agent, "LEASE_INVALID")
        own_etcd.resume()

        await eventually(lambda: _claims(agent, "set-1"), timeout_s=15)
        await eventually(lambda: _finds_nothing(registry), timeout_s=15)
        agent.connector.retain("set-2", keys=["key-of-set-1"])
        await found(registry)


async def _refused(agent: AgentNode, reason: str) -> None:
    async def holds() -> bool:
        return await agent.refusal("other", request_id=str(uuid.uuid4())) == reason

    await eventually(holds, timeout_s=10)


async def _finds_nothing(registry: Registry) -> bool:
    try:
        return not await find(registry)
    except grpc.aio.AioRpcError:
        # etcd is coming back.
        return False


async def test_a_successor_waits_for_the_lease_and_fences_what_it_finds(tmp_path: Path, registry: Registry) -> None:
    first = agent_node(tmp_path / "1", registry.address, lease_ttl_s=2, lease_margin_s=0.2)
    agent = await first.__aenter__()
    await agent.connector.connect()
    await ready(registry)
    agent.connector.retain("claimed")
    agent.connector.retain("free")
    await found_key(registry, "key-of-free")
    await agent.claim("claimed")
    sets, session = dict(agent.connector.sets), agent.connector.last_session
    await _kill(agent)

    async with agent_node(
        tmp_path / "2", registry.address, lease_ttl_s=2, lease_margin_s=0.2, claim_ttl_s=7, margin_s=0.5
    ) as successor:
        successor.connector.sets = sets
        successor.connector.last_session = session
        await successor.connector.connect()
        await _refused(successor, "LEASE_INVALID")
        await ready(registry, other_than=session)
        assert await successor.refusal("free", request_id="request-2") == "SET_FENCED"
        await eventually(lambda: _claims(successor, "free"), timeout_s=12)
        assert await successor.refusal("claimed", request_id="request-3") == "SET_UNKNOWN"
    with contextlib.suppress(asyncio.CancelledError):
        await first.__aexit__(None, None, None)


async def found_key(registry: Registry, key: str) -> None:
    """Waits until a key leads somewhere."""

    async def holds() -> bool:
        return bool(await find(registry, key))

    await eventually(holds)


async def _claims(agent: AgentNode, set_id: str) -> bool:
    try:
        await agent.claim(set_id, request_id=str(uuid.uuid4()))
    except BackhaulError:
        return False
    return True


async def _kill(agent: AgentNode) -> None:
    """Ends an agent without its farewell."""
    agent.running.cancel()
    await asyncio.wait([agent.running])
