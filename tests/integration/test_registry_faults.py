"""The registry while etcd dies, freezes, forgets or goes back in time."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.errors import FailedPreconditionError
from backhaul_common.etcd import EtcdClient, EtcdOptions, Put
from backhaul_common.grpc_client import to_error
from tests.fakes import samples
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.eventually import eventually
from tests.fakes.registry_process import Registry, running_registry
from tests.fakes.streams import Joining, Publishing, Watching, resuming

pytestmark = pytest.mark.etcd


@pytest.fixture
async def registry(own_etcd: EtcdProcess, cluster: str) -> AsyncIterator[Registry]:
    async with running_registry(own_etcd.endpoint, cluster) as replica:
        yield replica


async def is_serving(registry: Registry, service: str = "backhaul.registry.v1.IndexService") -> bool:
    stub = health_pb2_grpc.HealthStub(registry.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def serves(registry: Registry, timeout_s: float = 8.0) -> None:
    async def ready() -> bool:
        return await is_serving(registry)

    await eventually(ready, timeout_s)


async def refused(call: Any) -> tuple[str, float]:
    """Returns reason and seconds of a call that fails."""
    start = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return to_error(caught.value).reason, time.monotonic() - start


async def find(registry: Registry) -> list[str]:
    answer = await registry.index.FindBlockSets(pb.FindBlockSetsRequest(scope="scope", keys=["k1"]), timeout=5)
    return [pointer.set_id for pointer in answer.pointers]


async def test_starting_without_etcd_waits_and_serves_once_it_is_there(own_etcd: EtcdProcess, cluster: str) -> None:
    own_etcd.kill()
    async with running_registry(own_etcd.endpoint, cluster) as registry:
        assert not await is_serving(registry)
        reason, took_s = await refused(find(registry))
        assert (reason, took_s < 3) == ("ETCD_UNAVAILABLE", True)
        own_etcd.start()
        await serves(registry)
        assert await find(registry) == []


async def test_etcd_killed_and_restarted_on_its_data(registry: Registry, own_etcd: EtcdProcess) -> None:
    await serves(registry)
    async with Joining(registry.nodes) as join, Publishing(registry.index) as publish:
        lease_id = (await join.join(samples.node())).joined.lease_id
        await publish.open()
        await publish.batch([samples.pointer()])
        async with Watching(registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch:
            seen = await watch.next()
            own_etcd.kill()
            assert (await watch.failure()).reason == "ETCD_UNAVAILABLE"
        assert not await is_serving(registry)
        assert (await refused(find(registry)))[0] == "ETCD_UNAVAILABLE"
        error = await join.fails(keep_alive=pb.JoinNodeRequest.KeepAlive())
        assert error.reason == "ETCD_UNAVAILABLE"
        own_etcd.start()
        await serves(registry)
        assert await find(registry) == ["set-1"]
        # The publish stream outlived the outage.
        await publish.batch([samples.pointer("set-2")])
    async with Joining(registry.nodes) as join:
        await join.join(samples.node(state_reason="back"), lease_id=lease_id)
        async with Watching(registry.nodes.WatchNodes(resuming(seen))) as watch:
            assert (await watch.next()).WhichOneof("what") == "resumed"
            assert [node.node_id for node in (await watch.next()).change.upserts] == ["d1"]


async def test_a_frozen_etcd_blocks_no_call_for_long_and_nothing_is_lost(
    registry: Registry, own_etcd: EtcdProcess
) -> None:
    await serves(registry)
    async with Joining(registry.nodes) as join, Publishing(registry.index) as publish:
        await join.join(samples.node())
        await publish.open()
        await publish.batch([samples.pointer()])
        own_etcd.pause()
        try:
            frozen = time.monotonic()
            reason, took_s = await refused(find(registry))
            assert (reason, took_s < 3) == ("ETCD_UNAVAILABLE", True)
            with pytest.raises(grpc.aio.AioRpcError):
                await registry.index.FindBlockSets(pb.FindBlockSetsRequest(scope="s", keys=["k"]), timeout=0.05)
            await asyncio.sleep(max(0.0, frozen + 5 - time.monotonic()))
            assert not await is_serving(registry)
        finally:
            own_etcd.resume()
        await serves(registry)
        assert await find(registry) == ["set-1"]
        await publish.batch([samples.pointer("set-2")])
        assert (await join.send(keep_alive=pb.JoinNodeRequest.KeepAlive())).WhichOneof("step") == "kept"


async def test_a_compaction_while_the_watch_is_cut_loses_nothing(registry: Registry, own_etcd: EtcdProcess) -> None:
    await serves(registry)
    async with Joining(registry.nodes) as first, Joining(registry.nodes) as second:
        await first.join(samples.node("d1"))
        async with Watching(registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch:
            seen = await watch.next()
        own_etcd.kill()
        own_etcd.start()
        await eventually(lambda: "d1" in own_etcd.etcdctl("get", "--prefix", "/", "--keys-only"))
        for _ in range(5):
            own_etcd.etcdctl("put", "/elsewhere", "x")
        revision = own_etcd.etcdctl("get", "/elsewhere", "-w", "fields").split('"Revision" : ')[1].split()[0]
        own_etcd.etcdctl("compact", revision)
        await serves(registry)
        await second.join(samples.node("d2"))
        async with Watching(registry.nodes.WatchNodes(resuming(seen))) as watch:
            opening = await watch.next()
            assert opening.WhichOneof("what") == "resumed"
            await watch.until(lambda message: "d2" in {node.node_id for node in message.change.upserts})


async def test_etcd_restored_from_an_old_snapshot_starts_a_new_history(
    registry: Registry, own_etcd: EtcdProcess, tmp_path: Path
) -> None:
    await serves(registry)
    async with Joining(registry.nodes) as old, Joining(registry.nodes) as new, Joining(registry.nodes) as again:
        await old.join(samples.node("d1"), ttl_s=60)
        own_etcd.snapshot(tmp_path / "snapshot")
        await new.join(samples.node("d2"))
        async with Watching(registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch:
            opening = await watch.until(lambda message: len(message.snapshot.nodes) == 2)
            own_etcd.kill()
            own_etcd.restore(tmp_path / "snapshot")
            own_etcd.start()
            assert (await watch.failure()).reason in ("ETCD_UNAVAILABLE", "HISTORY_LOST")
        await serves(registry)
        async with Watching(registry.nodes.WatchNodes(resuming(opening))) as watch:
            anew = await watch.next()
            assert [node.node_id for node in anew.snapshot.nodes] == ["d1"]
            assert anew.revision < opening.revision
            assert (await new.fails(keep_alive=pb.JoinNodeRequest.KeepAlive())).reason == "LEASE_LOST"
            await again.join(samples.node("d2"))
            assert [node.node_id for node in (await watch.next()).change.upserts] == ["d2"]


async def test_a_full_etcd_is_named_and_lookups_go_on(tmp_path: Path, cluster: str) -> None:
    with EtcdProcess(tmp_path, "--quota-backend-bytes", str(2 * 1024 * 1024)) as etcd:
        async with running_registry(etcd.endpoint, cluster) as registry, Publishing(registry.index) as publish:
            await serves(registry)
            await publish.open()
            await publish.batch([samples.pointer()])
            await fill(etcd)
            error = await publish.fails(upserts=[samples.pointer("set-2")])
            assert (type(error).__name__, error.reason) == ("FailedPreconditionError", "ETCD_NO_SPACE")
            assert await find(registry) == ["set-1"]
            assert await is_serving(registry)


async def fill(etcd: EtcdProcess) -> None:
    async with EtcdClient(EtcdOptions(endpoints=(etcd.endpoint,))) as client:
        for number in range(60):
            # etcd learns its size when it commits, every 100 ms (server/mvcc/backend, defaultBatchInterval).
            await asyncio.sleep(0.05)
            try:
                await client.txn([], [Put(f"/filling/{number}".encode(), bytes(200_000))], repeatable=True)
            except FailedPreconditionError:
                return
    raise AssertionError("etcd does not fill up")


async def test_moving_to_an_endpoint_that_works(own_etcd: EtcdProcess, cluster: str) -> None:
    async with running_registry("127.0.0.1:9", cluster, etcd_endpoints=("127.0.0.1:9", own_etcd.endpoint)) as registry:
        await serves(registry)
        assert await find(registry) == []


def gauge(etcd: EtcdProcess, name: str) -> int:
    """Reads one of etcd's own figures."""
    return int(float(next(line.split()[1] for line in etcd.metrics() if line.startswith(f"{name} "))))


async def test_watchers_in_etcd_do_not_grow_with_clients_or_calls(registry: Registry, own_etcd: EtcdProcess) -> None:
    await serves(registry)
    watchers = "etcd_debugging_mvcc_watcher_total"
    leases = "etcd_debugging_lease_granted_total"
    await eventually(lambda: gauge(own_etcd, watchers) == 1)
    granted = gauge(own_etcd, leases)
    node_watches = [registry.nodes.WatchNodes(pb.WatchNodesRequest()) for _ in range(50)]
    pointer_watches = [registry.index.WatchBlockSets(pb.WatchBlockSetsRequest()) for _ in range(50)]
    for watch in (*node_watches, *pointer_watches):
        await watch.read()
    for _ in range(200):
        await find(registry)
    await eventually(lambda: gauge(own_etcd, watchers) == 2)
    assert gauge(own_etcd, leases) == granted
    for watch in (*node_watches, *pointer_watches):
        watch.cancel()
    await eventually(lambda: gauge(own_etcd, watchers) == 1)


async def test_an_idle_registry_writes_nothing(registry: Registry, own_etcd: EtcdProcess) -> None:
    await serves(registry)
    async with Joining(registry.nodes) as join, Publishing(registry.index) as publish:
        await join.join(samples.node(), ttl_s=2)
        await publish.open()
        before = (await registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=5)).revision
        for _ in range(3):
            await join.send(keep_alive=pb.JoinNodeRequest.KeepAlive())
        assert (await registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=5)).revision == before
