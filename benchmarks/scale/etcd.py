"""etcd in memory, which counts requests, and the bytes of what they write. It answers as `backhaul_common.etcd`."""

import asyncio
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence

from backhaul_common.errors import AbortedError
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


class CountingEtcd:
    """One store. Leases are renewed and never end by themselves: nobody here is late."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        """``find`` and ``write`` are transactions, of turns; ``look`` and ``lease`` are what time costs."""
        self.written_bytes = 0
        """Keys and values of all puts."""
        self._revision = 1
        self._kvs: dict[bytes, KeyValue] = {}
        self._keys: list[bytes] = []
        self._leases: dict[int, float] = {}
        self._under: defaultdict[int, set[bytes]] = defaultdict(set)
        self._watches: list[tuple[bytes, asyncio.Queue[WatchBatch]]] = []

    @property
    def stored_bytes(self) -> int:
        """Keys and values that are there now."""
        return sum(len(key) + len(kv.value) for key, kv in self._kvs.items())

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Op],
        otherwise: Sequence[Op] = (),
        *,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> TxnResult:
        """Reads or writes."""
        succeeded = all(map(self._holds, compares))
        ops = then if succeeded else otherwise
        self.requests["find" if all(isinstance(op, Get) for op in ops) else "write"] += 1
        reads, changes = [], dict[bytes, KeyValue | None]()
        for op in ops:
            match op:
                case Get():
                    reads.append(tuple(self._select(op)))
                case Put(key, value, lease_id):
                    changes[key] = self._put(key, value, lease_id)
                case Delete(key) if key in self._kvs:
                    self._delete(key)
                    changes[key] = None
        self._commit(changes)
        deleted = sum(kv is None for kv in changes.values())
        return TxnResult(succeeded, self._revision, tuple(reads), deleted)

    async def range(self, get: Get, *, revision: int = 0, timeout_s: float | None = None) -> Listing:
        """Reads."""
        self.requests["look"] += 1
        found = tuple(self._select(get))
        return Listing(found, self._revision, False, 1)

    async def list_prefix(self, prefix: bytes) -> Listing:
        """Reads all of a prefix."""
        return await self.range(Get(prefix, prefix_end(prefix)))

    async def grant(self, ttl_s: float) -> Lease:
        """Makes a lease."""
        self.requests["lease"] += 1
        lease_id = len(self._leases) + 1
        self._leases[lease_id] = ttl_s
        return Lease(lease_id, ttl_s)

    async def keep_alive_once(self, lease_id: int, *, timeout_s: float | None = None) -> Lease:
        """Renews one."""
        self.requests["lease"] += 1
        if lease_id not in self._leases:
            raise AbortedError("LEASE_LOST", "etcd no longer knows the lease")
        return Lease(lease_id, self._leases[lease_id])

    async def revoke(self, lease_id: int) -> None:
        """Ends one, and what is under it."""
        self.requests["lease"] += 1
        gone = [*self._under.pop(lease_id, ())]
        for key in gone:
            self._delete(key)
        self._commit(dict.fromkeys(gone))

    async def watch(self, prefix: bytes, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yields changes from now on: whoever watches has just listed."""
        # As many changes as there are; they are taken as they come.
        queue: asyncio.Queue[WatchBatch] = asyncio.Queue()
        self._watches.append((prefix, queue))
        yield WatchBatch(self._revision, store_revision=self._revision, cluster_id=1)
        while True:
            yield await queue.get()

    def _put(self, key: bytes, value: bytes, lease_id: int) -> KeyValue:
        old = self._kvs.get(key)
        if old is None:
            insort(self._keys, key)
        else:
            self._under[old.lease_id].discard(key)
        created = old.create_revision if old else self._revision + 1
        self._kvs[key] = kv = KeyValue(key, value, created, self._revision + 1, lease_id)
        self._under[lease_id].add(key)
        self.written_bytes += len(key) + len(value)
        return kv

    def _delete(self, key: bytes) -> None:
        kv = self._kvs.pop(key)
        del self._keys[bisect_left(self._keys, key)]
        self._under[kv.lease_id].discard(key)

    def _commit(self, changes: dict[bytes, KeyValue | None]) -> None:
        if not changes:
            return
        self._revision += 1
        for prefix, queue in self._watches:
            upserts = tuple(kv for key, kv in changes.items() if kv is not None and key.startswith(prefix))
            removals = tuple(key for key, kv in changes.items() if kv is None and key.startswith(prefix))
            if upserts or removals:
                stamp = {"store_revision": self._revision, "cluster_id": 1}
                queue.put_nowait(WatchBatch(self._revision, upserts, removals, **stamp))

    def _holds(self, compare: Compare) -> bool:
        kv = self._kvs.get(compare.key)
        match compare:
            case Absent():
                return kv is None
            case Unchanged(_, mod_revision):
                return kv is not None and kv.mod_revision == mod_revision
            case LeaseIs(_, lease_id):
                return kv is not None and kv.lease_id == lease_id

    def _select(self, get: Get) -> Sequence[KeyValue]:
        found = [*self._found(get)]
        if get.newest_first:
            found.sort(key=lambda kv: kv.create_revision, reverse=True)
        return found[: get.limit] if get.limit else found

    def _found(self, get: Get) -> Iterator[KeyValue]:
        if not get.end:
            if kv := self._kvs.get(get.key):
                yield kv
            return
        for place in range(bisect_left(self._keys, get.key), len(self._keys)):
            if self._keys[place] >= get.end:
                return
            yield self._kvs[self._keys[place]]
