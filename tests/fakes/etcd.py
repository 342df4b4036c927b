"""etcd in memory, with the calls of `backhaul_common.etcd.EtcdClient` that Backhaul makes."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from backhaul_common.errors import AbortedError, BackhaulError
from backhaul_common.etcd import (
    Absent,
    Compare,
    Delete,
    Get,
    KeyValue,
    Lease,
    LeaseIs,
    Listing,
    Op,
    Put,
    TxnResult,
    Unchanged,
    WatchBatch,
    prefix_end,
)
from tests.fakes.clock import FakeClock


class FakeEtcd:
    """One store at one revision; leases run on the test's clock."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.revision = 1
        self.cluster_id = 1
        self.failure: BackhaulError | None = None
        """Raised by every call while set."""
        self.calls: list[str] = []
        self._kvs: dict[bytes, KeyValue] = {}
        self._leases: dict[int, tuple[float, float]] = {}
        self._lease_ids = itertools.count(1)
        self._compacted = 0
        self._log: list[WatchBatch] = []
        self._changed = asyncio.Event()

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Op],
        otherwise: Sequence[Op] = (),
        *,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> TxnResult:
        self._enter("txn")
        succeeded = all(map(self._holds, compares))
        ops = then if succeeded else otherwise
        self._check(ops)
        reads, deleted = [], 0
        batch: dict[bytes, KeyValue | None] = {}
        revision = self.revision + 1
        for op in ops:
            match op:
                case Get():
                    reads.append(self._select(op))
                case Put(key, value, lease_id):
                    old = self._kvs.get(key)
                    created = old.create_revision if old else revision
                    batch[key] = self._kvs[key] = KeyValue(key, value, created, revision, lease_id)
                case Delete(key):
                    if self._kvs.pop(key, None):
                        deleted += 1
                        batch[key] = None
        self._commit(batch)
        return TxnResult(succeeded, self.revision, tuple(reads), deleted)

    async def range(self, get: Get, *, revision: int = 0, timeout_s: float | None = None) -> Listing:
        self._enter("range")
        found = self._select(Get(get.key, get.end, newest_first=get.newest_first))
        cut = found[: get.limit] if get.limit else found
        return Listing(cut, self.revision, len(cut) < len(found), self.cluster_id)

    async def list_prefix(self, prefix: bytes) -> Listing:
        return await self.range(Get(prefix, prefix_end(prefix)))

    async def grant(self, ttl_s: float) -> Lease:
        self._enter("grant")
        lease_id = next(self._lease_ids)
        self._leases[lease_id] = (ttl_s, self.clock.monotonic() + ttl_s)
        return Lease(lease_id, ttl_s)

    async def keep_alive_once(self, lease_id: int, *, timeout_s: float | None = None) -> Lease:
        self._enter("keep_alive_once")
        self._check_lease(lease_id)
        ttl_s = self._leases[lease_id][0]
        self._leases[lease_id] = (ttl_s, self.clock.monotonic() + ttl_s)
        return Lease(lease_id, ttl_s)

    async def revoke(self, lease_id: int) -> None:
        self._enter("revoke")
        self._end_lease(lease_id)

    async def ttl_s(self, lease_id: int) -> float:
        self._enter("ttl_s")
        self._check_lease(lease_id)
        return self._leases[lease_id][1] - self.clock.monotonic()

    async def watch(self, prefix: bytes, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        self._enter("watch")
        sent = start_revision - 1
        yield self._stamp(WatchBatch(self.revision))
        while True:
            changed = self._changed
            if self.failure is not None:
                raise self.failure
            if sent + 1 <= self._compacted:
                raise AbortedError("ETCD_COMPACTED", "etcd no longer has this revision")
            for batch in [batch for batch in self._log if batch.revision > sent]:
                sent = batch.revision
                upserts = tuple(kv for kv in batch.upserts if kv.key.startswith(prefix))
                removals = tuple(key for key in batch.removals if key.startswith(prefix))
                if upserts or removals:
                    yield self._stamp(WatchBatch(batch.revision, upserts, removals))
            await changed.wait()

    def compact(self) -> None:
        """Forgets the past."""
        self._compacted = self.revision
        self._log.clear()
        self._wake()

    def break_watches(self, error: BackhaulError) -> None:
        """Fails all watches, and every call until `mend`."""
        self.failure = error
        self._wake()

    def mend(self) -> None:
        """Answers again."""
        self.failure = None

    def restore(self, kvs: Sequence[KeyValue], revision: int) -> None:
        """Goes back to an old state."""
        self._kvs = {kv.key: kv for kv in kvs}
        self.revision = revision
        self._log.clear()

    def expire(self) -> None:
        """Ends the leases whose time is over, as etcd does about twice a second."""
        for lease_id, (_, deadline) in list(self._leases.items()):
            if deadline <= self.clock.monotonic():
                self._end_lease(lease_id)

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        self.expire()
        if self.failure is not None:
            raise self.failure

    def _stamp(self, batch: WatchBatch) -> WatchBatch:
        return replace(batch, store_revision=self.revision, cluster_id=self.cluster_id)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _commit(self, batch: dict[bytes, KeyValue | None]) -> None:
        if not batch:
            return
        self.revision += 1
        upserts = tuple(kv for kv in batch.values() if kv is not None)
        removals = tuple(key for key, kv in batch.items() if kv is None)
        self._log.append(WatchBatch(self.revision, upserts, removals))
        self._wake()

    def _end_lease(self, lease_id: int) -> None:
        self._leases.pop(lease_id, None)
        gone = [key for key, kv in self._kvs.items() if lease_id and kv.lease_id == lease_id]
        for key in gone:
            del self._kvs[key]
        self._commit(dict.fromkeys(gone))

    def _check(self, ops: Sequence[Op]) -> None:
        written = [op.key for op in ops if isinstance(op, Put | Delete)]
        assert len(written) == len(set(written)), "etcd: duplicate key given in txn request"
        assert len(ops) <= 128, "etcd: too many operations in txn request"
        for op in ops:
            if isinstance(op, Put) and op.lease_id:
                self._check_lease(op.lease_id)

    def _check_lease(self, lease_id: int) -> None:
        if lease_id not in self._leases:
            raise AbortedError("LEASE_LOST", "etcd no longer knows the lease")

    def _holds(self, compare: Compare) -> bool:
        kv = self._kvs.get(compare.key)
        match compare:
            case Absent():
                return kv is None
            case Unchanged(_, mod_revision):
                return kv is not None and kv.mod_revision == mod_revision
            case LeaseIs(_, lease_id):
                return kv is not None and kv.lease_id == lease_id

    def _select(self, get: Get) -> tuple[KeyValue, ...]:
        if not get.end:
            return tuple(kv for kv in (self._kvs.get(get.key),) if kv)
        found = sorted((kv for key, kv in self._kvs.items() if get.key <= key < get.end), key=lambda kv: kv.key)
        if get.newest_first:
            found.sort(key=lambda kv: kv.create_revision, reverse=True)
        return tuple(found[: get.limit] if get.limit else found)
