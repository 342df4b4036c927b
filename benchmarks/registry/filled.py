"""An etcd with pointers in it, and what they take there."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from backhaul_common.etcd import EtcdClient, EtcdOptions
from backhaul_common.etcd.stubs import rpc
from backhaul_local.etcd import EtcdMember, etcd_spec
from backhaul_local.ports import Ports
from backhaul_local.probes import http_ready
from backhaul_local.processes import Supervisor
from backhaul_registry.core.ledger import MAX_KEYS_PER_LEASE, Upsert
from backhaul_registry.etcd_store import Mark, PointerStore
from backhaul_registry.keys import Keys
from backhaul_registry.records import Records
from benchmarks.registry.machine import rss_bytes
from benchmarks.registry.pointers import CLUSTER, pointer_of

_START_S = 120
_CALL_S = 300.0
"""A database of a million pointers is copied whole when it is defragmented."""
_DAY_S = 86_400.0
_AT_ONCE = 8
_ROOM = "8589934592"
"""etcd's quota, bytes: the most that etcd recommends."""


@dataclass(frozen=True, slots=True)
class Filled:
    """An etcd with pointers in it."""

    endpoint: str
    pid: int
    pointer_count: int
    traced: bool
    data: Path
    """Its files: about a GB for a million pointers."""

    def remove(self) -> None:
        """Removes its files; once it has ended."""
        shutil.rmtree(self.data, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What one of the pointers takes, bytes."""

    pointer_count: int
    key_bytes: int
    value_bytes: int
    database_bytes: float
    """Of what is in use of the database after compaction and defragmentation."""
    memory_bytes: float
    """Of etcd's resident memory: its index, its leases, the database that it maps, and the log of what was written."""


def fill(
    name: str,
    pointer_count: int,
    *,
    supervisor: Supervisor,
    ports: Ports,
    data: Path,
    traced: bool = False,
    going_on: Callable[[], None] = lambda: None,
) -> Filled:
    """Starts an etcd, as it comes but with more room, and writes pointers. Raises LocalError.

    ``going_on`` is called now and then.
    """
    member = EtcdMember(name=name, client_port=ports.take(), peer_port=ports.take(), data=data / f"{name}.data")
    process = supervisor.start(etcd_spec(member, [member], ["--quota-backend-bytes", _ROOM]))
    supervisor.wait_until(name, partial(http_ready, f"http://{member.endpoint}/health"), _START_S)
    asyncio.run(write(member.endpoint, pointer_count, traced=traced, going_on=going_on))
    return Filled(member.endpoint, process.pid, pointer_count, traced, member.data)


def size_of(filled: Filled) -> Size:
    """Compacts and defragments, and returns what a pointer takes."""
    used_bytes = asyncio.run(_defragmented(filled.endpoint))
    keys, sample = Keys(CLUSTER), pointer_of(0, traced=filled.traced)
    return Size(
        pointer_count=filled.pointer_count,
        key_bytes=len(keys.pointer(sample)),
        value_bytes=len(Records(keys).write_pointer(sample)),
        database_bytes=used_bytes / filled.pointer_count,
        memory_bytes=rss_bytes(filled.pid) / filled.pointer_count,
    )


async def write(
    endpoint: str, count: int, *, traced: bool = False, going_on: Callable[[], None] = lambda: None
) -> None:
    """Writes pointers as registries do, under leases that outlast the measurement."""
    starts = iter(range(0, count, MAX_KEYS_PER_LEASE))
    async with EtcdClient(EtcdOptions(endpoints=(endpoint,), attempt_s=_CALL_S, total_s=_CALL_S)) as client:
        keys = Keys(CLUSTER)
        store = PointerStore(client, keys, Records(keys))

        async def write_rest() -> None:
            for start in starts:
                lease = await store.grant(_DAY_S)
                numbers = range(start, min(count, start + MAX_KEYS_PER_LEASE))
                writes = [Upsert(pointer_of(number, traced=traced), lease.lease_id) for number in numbers]
                await store.write(writes, Mark(f"fill-{start}", lease.lease_id))
                going_on()

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(write_rest())


async def _defragmented(endpoint: str) -> int:
    """Compacts and defragments; returns the bytes in use."""
    async with grpc.aio.insecure_channel(endpoint, options=[("grpc.enable_http_proxy", 0)]) as channel:
        kv, maintenance = rpc.KVStub(channel), rpc.MaintenanceStub(channel)
        revision = (await kv.Range(rpc.RangeRequest(key=b"x"), timeout=_CALL_S)).header.revision
        await kv.Compact(rpc.CompactionRequest(revision=revision, physical=True), timeout=_CALL_S)
        await maintenance.Defragment(rpc.DefragmentRequest(), timeout=_CALL_S)
        return int((await maintenance.Status(rpc.StatusRequest(), timeout=_CALL_S)).dbSizeInUse)
