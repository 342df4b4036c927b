"""What etcd does to a registry and an agent: it dies, forgets, goes back in time, fills up, and is tampered with."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.errors import FailedPreconditionError
from backhaul_common.etcd import EtcdClient, EtcdOptions, Get, Put
from backhaul_registry.app import WRITES
from tests.contract.owner_node import agent_node
from tests.fakes import samples
from tests.fakes.complaints import complaints
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.eventually import eventually
from tests.fakes.proxy import Proxy
from tests.fakes.recovery import recovered
from tests.fakes.registry_process import running_registry
from tests.fakes.streams import Joining, Watching, resuming
from tests.integration.system import System

pytestmark = pytest.mark.etcd


@asynccontextmanager
async def running(endpoint: str, tmp_path: Path, *, lease_ttl_s: int = 2, **settings: Any) -> AsyncIterator[System]:
    """Runs a system with short leases."""
    async with AsyncExitStack() as stack:
        replica = running_registry(endpoint, "cluster", pointer_ttl_s=2, **settings)
        registry = await stack.enter_async_context(replica)
        node = agent_node(tmp_path, registry.address, lease_ttl_s=lease_ttl_s, lease_margin_s=0.2)
        system = System(registry, await stack.enter_async_context(node))
        await system.begin()
        yield system


@pytest.mark.parametrize("away_s", [0.5, 4.0], ids=["shorter than a lease", "longer than a lease"])
async def test_etcd_is_killed_and_started_again(own_etcd: EtcdProcess, tmp_path: Path, away_s: float) -> None:
    async with running(own_etcd.endpoint, tmp_path) as system:
        own_etcd.kill()
        await asyncio.sleep(away_s)
        own_etcd.start()
        await system.works_again(f"etcd away for {away_s:g} s", within_s=10)


async def test_etcd_is_restored_from_an_old_snapshot(own_etcd: EtcdProcess, tmp_path: Path) -> None:
    async with running(own_etcd.endpoint, tmp_path) as system:
        # The node's lease and the stream's are in the snapshot; what is written under them from here on is not.
        own_etcd.snapshot(tmp_path / "snapshot")
        system.agent.connector.retain("set-2")
        await eventually(lambda: system.finds("set-2"))
        system.agent.http.models.append("adapter")
        await eventually(lambda: serves(system, "adapter"), 10)
        own_etcd.kill()
        own_etcd.restore(tmp_path / "snapshot")
        own_etcd.start()
        await asyncio.gather(
            system.works_again("etcd restored", within_s=10),
            recovered("etcd restored: pointers written since", lambda: system.finds("set-2"), within_s=10),
            recovered("etcd restored: record written since", lambda: serves(system, "adapter"), within_s=10),
        )


async def serves(system: System, model: str) -> bool:
    """Tells whether the directory says so."""
    answer = await system.registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=1)
    return any(model in node.models for node in answer.nodes)


async def test_a_watch_is_not_resumed_on_a_history_that_reached_the_same_revision_again(
    own_etcd: EtcdProcess, tmp_path: Path
) -> None:
    async with running_registry(own_etcd.endpoint, "cluster") as registry, Joining(registry.nodes) as join:
        await join.join(samples.node("kept"), ttl_s=60)
        own_etcd.snapshot(tmp_path / "snapshot")
        async with (
            Joining(registry.nodes) as lost,
            Watching(registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch,
        ):
            await lost.join(samples.node("lost"), ttl_s=60)
            seen = await watch.until(lambda message: "lost" in str(message))
    own_etcd.kill()
    own_etcd.restore(tmp_path / "snapshot")
    own_etcd.start()
    await write_until(own_etcd, seen.revision)
    async with running_registry(own_etcd.endpoint, "cluster") as registry:
        # Another replica, which began after the restore and before that revision.
        async with Watching(registry.nodes.WatchNodes(resuming(seen))) as watch:
            opening = await watch.next()
            assert [node.node_id for node in opening.snapshot.nodes] == ["kept"]
        await write_until(own_etcd, opening.revision + 20)
        async with Joining(registry.nodes) as join, Watching(registry.nodes.WatchNodes(resuming(opening))) as watch:
            assert (await watch.next()).WhichOneof("what") == "resumed"
            await join.join(samples.node("new"))
            assert [node.node_id for node in (await watch.next()).change.upserts] == ["new"]


async def test_etcd_is_compacted_while_a_registry_is_cut_off(own_etcd: EtcdProcess, tmp_path: Path) -> None:
    with Proxy(own_etcd.endpoint) as proxy:
        async with (
            running(proxy.address, tmp_path) as system,
            running_registry(own_etcd.endpoint, "cluster") as other,
            Joining(other.nodes) as join,
        ):
            proxy.cut()
            await join.join(samples.node("new"))
            for number in range(50):
                await join.send(update=pb.JoinNodeRequest.Update(node=samples.node("new", state_reason=f"{number}")))
            compact(own_etcd)
            own_etcd.etcdctl("defrag")
            proxy.heal()

            async def seen() -> bool:
                reasons = {node.node_id: node.state_reason for node in await system.watched()}
                return reasons.get("new") == "49"

            await recovered("compacted while cut off: all changes seen", seen, within_s=10)
            # Connected and idle, a compaction disturbs nothing.
            own_etcd.etcdctl("put", "/elsewhere", "x")
            compact(own_etcd)
            await recovered("compacted while connected", seen, within_s=10)


def compact(etcd: EtcdProcess) -> None:
    """Makes etcd forget every revision but the last."""
    revision = etcd.etcdctl("get", "/", "-w", "fields").split('"Revision" : ')[1].split()[0]
    etcd.etcdctl("compact", "--physical", revision)


async def write_until(etcd: EtcdProcess, revision: int) -> None:
    """Makes etcd's revision reach a number."""
    async with EtcdClient(EtcdOptions(endpoints=(etcd.endpoint,), total_s=10)) as client:
        while (await client.range(Get(b"/elsewhere"))).revision < revision:
            await client.txn([], [Put(b"/elsewhere", b"x")], repeatable=True)


async def test_etcd_is_full(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path, "--quota-backend-bytes", str(2 * 1024 * 1024)) as etcd, capture_logs() as logs:
        async with running(etcd.endpoint, tmp_path) as system:
            await eventually(lambda: writable(system))
            session = (await directory(system))[0].session
            await fill(etcd)

            async def told() -> bool:
                return not await writable(system)

            await recovered("etcd full: told", told, within_s=10)
            # Twice the time of a lease: the node stays, with the record that it had, and lookups are answered.
            system.agent.http.models.append("adapter")
            system.agent.connector.retain("set-2")
            deadline = time.monotonic() + 4
            while time.monotonic() < deadline:
                assert [node.session for node in await directory(system)] == [session]
                await system.finds("set-1")
                await asyncio.sleep(0.1)
            await system.claims()
            etcd.etcdctl("del", "--prefix", "/filling")
            compact(etcd)
            etcd.etcdctl("defrag")
            etcd.etcdctl("alarm", "disarm")
            await asyncio.gather(
                system.works_again("etcd has space again", within_s=10),
                recovered("etcd has space again: told", lambda: writable(system), within_s=10),
                recovered("etcd has space again: kept back", lambda: system.finds("set-2"), within_s=10),
                recovered("etcd has space again: record", lambda: serves(system, "adapter"), within_s=10),
            )
    events = [str(log["event"]).partition(":")[0] for log in logs]
    assert (events.count("etcd is full"), events.count("etcd has space again")) == (1, 1)
    assert events.count("publishing interrupted") < 5


async def directory(system: System) -> list[pb.Node]:
    """Returns all nodes."""
    return list((await system.registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=2)).nodes)


async def writable(system: System) -> bool:
    """Asks the registry's health whether etcd takes writes."""
    stub = health_pb2_grpc.HealthStub(system.registry.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=WRITES), timeout=2)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def fill(etcd: EtcdProcess) -> None:
    """Writes until etcd takes no more."""
    async with EtcdClient(EtcdOptions(endpoints=(etcd.endpoint,))) as client:
        for number in range(60):
            # etcd learns its size when it commits, every 100 ms (server/mvcc/backend, defaultBatchInterval).
            await asyncio.sleep(0.05)
            try:
                await client.txn([], [Put(f"/filling/{number}".encode(), bytes(200_000))], repeatable=True)
            except FailedPreconditionError:
                return
    raise AssertionError("etcd does not fill up")


def node_lease(etcd: EtcdProcess) -> str:
    """Returns the lease under which the node is."""
    fields = etcd.etcdctl("get", "--prefix", "/cluster/nodes/", "-w", "fields").splitlines()
    (lease_id,) = [int(line.split(":")[1]) for line in fields if line.startswith('"Lease"')]
    return f"{lease_id:x}"


TAMPERING: dict[str, Callable[[EtcdProcess], object]] = {
    "node's lease revoked": lambda etcd: etcd.etcdctl("lease", "revoke", node_lease(etcd)),
    "node's key deleted": lambda etcd: etcd.etcdctl("del", "--prefix", "/cluster/nodes/"),
    "all keys deleted": lambda etcd: etcd.etcdctl("del", "--prefix", "/cluster/"),
    "node's record overwritten": lambda etcd: etcd.etcdctl("put", "/cluster/nodes/node-1", "garbage"),
    "node's record overwritten under its lease": lambda etcd: etcd.etcdctl(
        "put", "/cluster/nodes/node-1", "garbage", "--ignore-lease"
    ),
}


@pytest.mark.parametrize("kind", TAMPERING)
async def test_somebody_tampers_with_etcd(own_etcd: EtcdProcess, tmp_path: Path, kind: str) -> None:
    async with running(own_etcd.endpoint, tmp_path) as system:
        TAMPERING[kind](own_etcd)
        await system.works_again(kind, within_s=10)


def switch_authentication_on(etcd: EtcdProcess) -> None:
    """Makes two users: root, and one that may do what a registry does."""
    etcd.etcdctl("user", "add", "root:rootpw")
    etcd.etcdctl("user", "grant-role", "root", "root")
    etcd.etcdctl("user", "add", "backhaul:secret")
    etcd.etcdctl("role", "add", "backhaul")
    etcd.etcdctl("role", "grant-permission", "backhaul", "--prefix=true", "readwrite", "/cluster/")
    etcd.etcdctl("user", "grant-role", "backhaul", "backhaul")
    etcd.etcdctl("auth", "enable")


async def test_tokens_of_etcd_end_after_a_second_and_with_its_process(tmp_path: Path) -> None:
    user: dict[str, Any] = {"etcd_user": "backhaul", "etcd_password": "secret"}
    with EtcdProcess(tmp_path, "--auth-token-ttl", "1") as etcd:
        switch_authentication_on(etcd)
        async with running(etcd.endpoint, tmp_path, **user) as system:
            # Idle for longer than any token lives; leases go on.
            await asyncio.sleep(2.5)
            await system.works_again("tokens expired", within_s=10)
            etcd.kill()
            etcd.start()
            await system.works_again("etcd restarted without its tokens", within_s=10)


async def test_a_wrong_password_is_named_and_waited_for(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path) as etcd, capture_logs() as logs:
        switch_authentication_on(etcd)
        wrong: dict[str, Any] = {"etcd_user": "backhaul", "etcd_password": "wrong"}
        async with running_registry(etcd.endpoint, "cluster", **wrong) as registry, Joining(registry.nodes) as join:
            error = await join.refused(samples.node())
            assert (type(error).__name__, error.reason) == ("UnauthenticatedError", "ETCD_AUTH")
            etcd.etcdctl("--user", "root:rootpw", "user", "passwd", "backhaul", "--interactive=false", stdin="wrong")

            async def lists() -> bool:
                await registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=2)
                return True

            await recovered("password set right", lists, within_s=10)
    assert [log["problem"] for log in logs if log["event"] == "etcd does not answer"] == [
        "etcd refused the user or the password"
    ]


async def test_connections_to_etcd_break_again_and_again(own_etcd: EtcdProcess, tmp_path: Path) -> None:
    with Proxy(own_etcd.endpoint) as proxy, capture_logs() as logs:
        async with running(proxy.address, tmp_path, lease_ttl_s=4) as system:
            for _ in range(10):
                await asyncio.sleep(0.45)
                proxy.cut()
                await asyncio.sleep(0.05)
                proxy.heal()
            await system.works_again("connections broken twice a second", within_s=10)
            assert not [log for log in logs if str(log["event"]).startswith("lease lost")]


async def test_a_busy_event_loop_costs_no_lease(own_etcd: EtcdProcess, tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with running(own_etcd.endpoint, tmp_path, lease_ttl_s=4) as system:
            for _ in range(4):
                # The agent's, the registry's and this test's are one.
                block(1.0)
                await asyncio.sleep(0.2)
            await system.works_again("event loop blocked for a second", within_s=10)
            assert not [log for log in logs if str(log["event"]).startswith("lease lost")]


def block(seconds: float) -> None:
    """Keeps the event loop busy."""
    time.sleep(seconds)


async def test_garbage_in_the_directory_stops_nothing_and_kills_no_task(
    own_etcd: EtcdProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(own_etcd.endpoint, tmp_path) as system:
        async with EtcdClient(EtcdOptions(endpoints=(own_etcd.endpoint,))) as client:
            for number in range(100):
                garbage = [b"", b"\xff" * number, b'{"port": 1}', b"\x02later"][number % 4]
                await client.txn([], [Put(f"/cluster/nodes/ghost-{number}".encode(), garbage)])
                await client.txn(
                    [], [Put(f"/cluster/index/scope-1/key-of-set-{number % 10}/{number}".encode(), garbage)]
                )
        async with Watching(system.registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch:
            assert [node.node_id for node in (await watch.next()).snapshot.nodes] == ["node-1"]
        await system.works_again("a hundred garbage records", within_s=10)
    gc.collect()
    assert complaints(caplog, logger="asyncio") == []
