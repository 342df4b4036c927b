"""The node directory against a real etcd."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.clock import SystemClock
from backhaul_common.grpc_client import to_error
from backhaul_router.core.nodes import NodeTable
from backhaul_router.registry_client import RegistryClient
from tests.fakes import samples
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.eventually import eventually
from tests.fakes.registry_process import Registry, running_registry
from tests.fakes.streams import Joining, Watching, resuming

pytestmark = pytest.mark.etcd


async def node_ids(registry: Registry) -> list[str]:
    answer = await registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=5)
    return [node.node_id for node in answer.nodes]


async def test_a_node_joins_is_listed_and_leaves(registry: Registry) -> None:
    async with Joining(registry.nodes) as stream:
        joined = await stream.join(samples.node())
        assert joined.joined.lease_id
        assert joined.ttl.seconds == 10
        answer = await registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=5)
        assert list(answer.nodes) == [samples.node()]
        kept = await stream.send(keep_alive=pb.JoinNodeRequest.KeepAlive())
        assert (kept.WhichOneof("step"), kept.sequence) == ("kept", 2)
        left = await stream.send(leave=pb.JoinNodeRequest.Leave())
        assert left.WhichOneof("step") == "left"
        assert await stream.ended() is None
    assert await node_ids(registry) == []


async def test_an_update_replaces_the_record(registry: Registry) -> None:
    async with Joining(registry.nodes) as stream:
        await stream.join(samples.node())
        draining = samples.node(state=pb.NODE_STATE_DRAINING, state_reason="maintenance")
        await stream.send(update=pb.JoinNodeRequest.Update(node=draining))
        answer = await registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=5)
        assert list(answer.nodes) == [draining]


async def test_a_broken_stream_leaves_the_node_until_its_lease_ends(registry: Registry) -> None:
    async with Joining(registry.nodes) as stream:
        await stream.join(samples.node(), ttl_s=2)
    assert await node_ids(registry) == ["d1"]

    async def gone() -> bool:
        return await node_ids(registry) == []

    await eventually(gone, 6)


async def test_another_session_is_refused_while_the_lease_lives(registry: Registry) -> None:
    async with Joining(registry.nodes) as first, Joining(registry.nodes) as second:
        await first.join(samples.node(session="s1"))
        error = await second.refused(samples.node(session="s2"))
        assert (type(error).__name__, error.reason) == ("AlreadyExistsError", "NODE_TAKEN")
        await first.send(keep_alive=pb.JoinNodeRequest.KeepAlive())


async def test_the_same_session_adopts_its_lease_on_another_replica(
    registry: Registry, shared_etcd: EtcdProcess, cluster: str
) -> None:
    async with running_registry(shared_etcd.endpoint, cluster) as other:
        async with Joining(registry.nodes) as stream:
            lease_id = (await stream.join(samples.node())).joined.lease_id
        async with Joining(other.nodes) as stream:
            adopted = await stream.join(samples.node(state_reason="again"), lease_id=lease_id)
            assert adopted.joined.lease_id == lease_id
            answer = await registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=5)
            assert [node.state_reason for node in answer.nodes] == ["again"]


async def test_the_same_session_without_its_lease_takes_over(registry: Registry) -> None:
    async with Joining(registry.nodes) as old, Joining(registry.nodes) as new:
        await old.join(samples.node())
        await new.join(samples.node())
        error = await old.fails(keep_alive=pb.JoinNodeRequest.KeepAlive())
        assert error.reason == "LEASE_LOST"
        await new.send(keep_alive=pb.JoinNodeRequest.KeepAlive())
        assert await node_ids(registry) == ["d1"]


async def test_a_lost_lease_aborts_the_stream_and_cannot_be_adopted(
    registry: Registry, shared_etcd: EtcdProcess
) -> None:
    async with Joining(registry.nodes) as stream:
        lease_id = (await stream.join(samples.node())).joined.lease_id
        shared_etcd.etcdctl("lease", "revoke", f"{lease_id:x}")
        error = await stream.fails(keep_alive=pb.JoinNodeRequest.KeepAlive())
        assert (type(error).__name__, error.reason) == ("AbortedError", "LEASE_LOST")
    async with Joining(registry.nodes) as stream:
        error = await stream.refused(samples.node(), lease_id=lease_id)
        assert error.reason == "LEASE_LOST"
    assert await node_ids(registry) == []


async def test_a_record_deleted_by_hand_comes_back_with_the_next_keep_alive(
    registry: Registry, shared_etcd: EtcdProcess, cluster: str
) -> None:
    async with Joining(registry.nodes) as stream:
        await stream.join(samples.node())
        shared_etcd.etcdctl("del", f"/{cluster}/nodes/d1")
        await stream.send(keep_alive=pb.JoinNodeRequest.KeepAlive())
        assert await node_ids(registry) == ["d1"]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        pytest.param({"keep_alive": pb.JoinNodeRequest.KeepAlive()}, "JOIN_EXPECTED", id="not join first"),
        pytest.param({"join": pb.JoinNodeRequest.Join()}, "ENUM_INVALID", id="empty record"),
        pytest.param(
            {"join": pb.JoinNodeRequest.Join(node=samples.node(node_id="a/b"))}, "ID_INVALID", id="slash in the id"
        ),
        pytest.param(
            {"join": pb.JoinNodeRequest.Join(node=samples.node(models=["m" * 1000] * 100))}, "NODE_TOO_LARGE", id="size"
        ),
        pytest.param(
            {"join": pb.JoinNodeRequest.Join(node=samples.node(), ttl=Duration(seconds=61))},
            "TTL_INVALID",
            id="long ttl",
        ),
    ],
)
async def test_a_wrong_first_message_is_refused(registry: Registry, step: dict[str, Any], reason: str) -> None:
    async with Joining(registry.nodes) as stream:
        error = await stream.fails(**step)
        assert (type(error).__name__, error.reason) == ("InvalidArgumentError", reason)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        pytest.param({"join": pb.JoinNodeRequest.Join(node=samples.node())}, "STEP_UNEXPECTED", id="second join"),
        pytest.param({}, "STEP_UNEXPECTED", id="no step"),
        pytest.param(
            {"update": pb.JoinNodeRequest.Update(node=samples.node(session="s2"))}, "NODE_CHANGED", id="other session"
        ),
        pytest.param({"sequence": 1, "keep_alive": pb.JoinNodeRequest.KeepAlive()}, "NOT_INCREASING", id="sequence"),
    ],
)
async def test_a_wrong_later_message_is_refused(registry: Registry, step: dict[str, Any], reason: str) -> None:
    async with Joining(registry.nodes) as stream:
        await stream.join(samples.node())
        error = await stream.fails(**step)
        assert (type(error).__name__, error.reason) == ("InvalidArgumentError", reason)


async def test_a_watch_starts_with_a_snapshot_and_tells_every_change(registry: Registry) -> None:
    async with Joining(registry.nodes) as first, Joining(registry.nodes) as second:
        await first.join(samples.node("d1"))
        async with Watching(registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch:
            opening = await watch.next()
            assert [node.node_id for node in opening.snapshot.nodes] == ["d1"]
            await second.join(samples.node("d2"))
            change = await watch.next()
            assert [node.node_id for node in change.change.upserts] == ["d2"]
            await second.send(leave=pb.JoinNodeRequest.Leave())
            gone = await watch.next()
            assert list(gone.change.removals) == ["d2"]
            assert opening.revision < change.revision < gone.revision


async def test_a_watch_resumes_without_a_gap(registry: Registry) -> None:
    async with Watching(registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch:
        seen = await watch.next()
    async with Joining(registry.nodes) as stream:
        await stream.join(samples.node())
        async with Watching(registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch:
            await watch.until(lambda message: "d1" in {node.node_id for node in message.snapshot.nodes})
        async with Watching(registry.nodes.WatchNodes(resuming(seen))) as watch:
            assert (await watch.next()).WhichOneof("what") == "resumed"
            assert [node.node_id for node in (await watch.next()).change.upserts] == ["d1"]


async def test_a_router_takes_a_directory_that_comes_in_parts(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backhaul_registry.convert.NODES_PER_MESSAGE", 2)
    table = NodeTable()
    async with contextlib.AsyncExitStack() as stack:
        for number in range(5):
            stream = await stack.enter_async_context(Joining(registry.nodes))
            await stream.join(samples.node(f"d{number}", engine_url=f"http://127.0.0.1:{8200 + number}"))
        async with RegistryClient([registry.address], table=table, clock=SystemClock()) as client:
            assert await client.listed(within_s=10)
            assert sorted(node.node_id for node in table) == [f"d{number}" for number in range(5)]


@pytest.mark.parametrize("revision", [1, 1 << 40], ids=["too old", "from another history"])
async def test_a_watch_that_cannot_resume_starts_afresh(registry: Registry, revision: int) -> None:
    async with Watching(registry.nodes.WatchNodes(pb.WatchNodesRequest(start_revision=revision))) as watch:
        assert (await watch.next()).WhichOneof("what") == "snapshot"


@pytest.mark.parametrize("value", ["", "garbage", '{"node_id": "x"}', "\x02"], ids=["empty", "text", "json", "version"])
async def test_an_unreadable_record_hides_nothing_else(
    registry: Registry, shared_etcd: EtcdProcess, cluster: str, value: str
) -> None:
    async with Watching(registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch, Joining(registry.nodes) as stream:
        await watch.next()
        shared_etcd.etcdctl("put", f"/{cluster}/nodes/d0", "--", value)
        await stream.join(samples.node("d1"))
        assert [node.node_id for node in (await watch.next()).change.upserts] == ["d1"]
        assert await node_ids(registry) == ["d1"]
        shared_etcd.etcdctl("put", f"/{cluster}/nodes/d1", "--", value)
        assert list((await watch.next()).change.removals) == ["d1"]


async def test_nodes_join_through_one_replica_and_are_watched_through_another(
    registry: Registry, shared_etcd: EtcdProcess, cluster: str
) -> None:
    async with (
        running_registry(shared_etcd.endpoint, cluster) as other,
        Watching(other.nodes.WatchNodes(pb.WatchNodesRequest())) as watch,
        Joining(registry.nodes) as stream,
    ):
        await watch.next()
        await stream.join(samples.node())
        assert [node.node_id for node in (await watch.next()).change.upserts] == ["d1"]


async def test_stopping_ends_streams_as_unavailable_within_a_second(shared_etcd: EtcdProcess, cluster: str) -> None:
    async with running_registry(shared_etcd.endpoint, cluster) as replica, Joining(replica.nodes) as stream:
        await stream.join(samples.node())
        watch = replica.nodes.WatchNodes(pb.WatchNodesRequest())
        await watch.read()
        replica.stopping.set()
        async with asyncio.timeout(1):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            assert to_error(caught.value).reason == "SHUTTING_DOWN"
            error = await stream.ended()
            assert error is not None
            assert error.reason == "SHUTTING_DOWN"
        async with asyncio.timeout(5):
            await replica.ended
