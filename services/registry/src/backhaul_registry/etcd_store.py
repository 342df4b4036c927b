"""The registry's state in etcd."""

import base64
import binascii
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from backhaul_common.errors import AbortedError, AlreadyExistsError, FailedPreconditionError, InvalidArgumentError
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
    prefix_end,
)
from backhaul_registry.core.ledger import Removal, Upsert, Write, chunks
from backhaul_registry.core.membership import Create, Replace, Stored, decide_join, decide_keep
from backhaul_registry.core.membership import Write as RecordWrite
from backhaul_registry.core.model import Node, Pointer, PointerId
from backhaul_registry.core.rules import MAX_POINTERS_PER_KEY
from backhaul_registry.keys import Keys
from backhaul_registry.records import Records

_log = structlog.get_logger(__name__)

_MAX_KEY_BYTES = 2_048

_MAX_TRIES = 5
"""Times a record is decided upon anew while others write it."""

Decide = Callable[[Stored | None, Node, int], RecordWrite]


class Etcd(Protocol):
    """What the stores need of etcd; see `backhaul_common.etcd.EtcdClient`."""

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Op],
        otherwise: Sequence[Op] = (),
        *,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> TxnResult: ...

    async def range(self, get: Get, *, revision: int = 0, timeout_s: float | None = None) -> Listing: ...

    async def list_prefix(self, prefix: bytes) -> Listing: ...

    async def grant(self, ttl_s: float) -> Lease: ...

    async def keep_alive_once(self, lease_id: int) -> Lease: ...

    async def revoke(self, lease_id: int) -> None: ...


class NodeStore:
    """Records of nodes, each under its node's lease."""

    def __init__(self, etcd: Etcd, keys: Keys, records: Records) -> None:
        self._etcd = etcd
        self._keys = keys
        self._records = records

    async def join(self, node: Node, *, ttl_s: float, lease_id: int) -> Lease:
        """Writes the record under a new lease, or under ``lease_id`` when it is not 0.

        Raises AlreadyExistsError (NODE_TAKEN), AbortedError (LEASE_LOST).
        """
        if lease_id:
            return await self._renew(node, lease_id, decide_join)
        lease = await self._etcd.grant(ttl_s)
        try:
            superseded = await self._write(node, lease.lease_id, decide_join)
        except AlreadyExistsError:
            await self._etcd.revoke(lease.lease_id)
            raise
        if superseded:
            await self._etcd.revoke(superseded)
        return lease

    async def keep(self, node: Node, lease_id: int) -> Lease:
        """Renews the lease and makes sure that the record is there and says what it should.

        Raises AbortedError (LEASE_LOST).
        """
        return await self._renew(node, lease_id, decide_keep)

    async def leave(self, lease_id: int) -> None:
        """Ends the lease, and the record with it."""
        await self._etcd.revoke(lease_id)

    async def list(self) -> tuple[tuple[Node, ...], int]:
        """Returns all nodes by id, and the revision of the listing."""
        listing = await self._etcd.list_prefix(self._keys.nodes)
        return tuple(filter(None, map(self._records.read_node, listing.items))), listing.revision

    async def _renew(self, node: Node, lease_id: int, decide: Decide) -> Lease:
        lease = await self._etcd.keep_alive_once(lease_id)
        found = (await self._etcd.range(Get(self._keys.node(node.node_id)))).items
        held = bool(found) and found[0].lease_id == lease_id
        if held and found[0].value == self._records.write_node(node):
            return lease
        # It is another one after an update, and after etcd was restored from a snapshot that is older than the record.
        try:
            superseded = await self._write(node, lease_id, decide)
        except FailedPreconditionError as error:
            if not held:
                raise
            # An etcd that is full still renews leases: an older record is better than none.
            _log.warning("node record not written", node_id=node.node_id, reason=error.reason, problem=error.message)
            return lease
        if superseded:
            await self._etcd.revoke(superseded)
        return lease

    async def _write(self, node: Node, lease_id: int, decide: Decide) -> int:
        """Writes as decided and returns the superseded lease, 0 for none.

        Repeatable: after a lost answer the record is found under this lease and written again.
        """
        key = self._keys.node(node.node_id)
        write = decide(None, node, lease_id)
        for _ in range(_MAX_TRIES):
            result = await self._etcd.txn(
                [_unless_changed(key, write)], [self._put(node, lease_id)], [Get(key)], repeatable=True
            )
            if result.succeeded:
                return write.superseded_lease_id if isinstance(write, Replace) else 0
            write = decide(self._stored(result.reads[0]), node, lease_id)
        raise AbortedError("CONFLICT", "others keep writing the node's record", node_id=node.node_id)

    def _put(self, node: Node, lease_id: int) -> Put:
        return Put(self._keys.node(node.node_id), self._records.write_node(node), lease_id)

    def _stored(self, found: Sequence[KeyValue]) -> Stored | None:
        return next((Stored(self._records.read_node(kv), kv.lease_id, kv.mod_revision) for kv in found), None)


def _unless_changed(key: bytes, write: RecordWrite) -> Compare:
    match write:
        case Create():
            return Absent(key)
        case Replace(mod_revision):
            return Unchanged(key, mod_revision)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a publish stream writes beside its pointers, so that each write, and each look, shows that all are there."""

    stream_id: str
    lease_id: int
    number: int = 0
    """Transactions so far."""
    revision: int = 0
    """Of the last one."""


class PointerStore:
    """Pointers, under the leases of the streams that publish them."""

    def __init__(self, etcd: Etcd, keys: Keys, records: Records) -> None:
        self._etcd = etcd
        self._keys = keys
        self._records = records

    async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> tuple[Pointer, ...]:
        """Returns the newest pointers of each key, in the order of the keys."""
        prefixes = [self._keys.lookup(scope, key) for key in keys]
        gets = [Get(prefix, prefix_end(prefix), MAX_POINTERS_PER_KEY, newest_first=True) for prefix in prefixes]
        found = itertools.chain.from_iterable(await self._read(gets, timeout_s))
        return tuple(filter(None, map(self._records.read_pointer, found)))

    async def grant(self, ttl_s: float) -> Lease:
        """Makes a lease for pointers."""
        return await self._etcd.grant(ttl_s)

    async def renew(self, lease_id: int) -> None:
        """Renews a lease. Raises AbortedError (LEASE_LOST)."""
        await self._etcd.keep_alive_once(lease_id)

    async def write(self, writes: Sequence[Write], mark: Mark) -> Mark:
        """Writes and removes pointers, in transactions of at most 100, if etcd still has the mark; returns the next.

        Raises AbortedError (LEASE_LOST, HISTORY_LOST).
        """
        for chunk in chunks(writes):
            mark = await self._write(chunk, mark)
        return mark

    async def _write(self, writes: Sequence[Write], mark: Mark) -> Mark:
        key, number = self._keys.stream(mark.stream_id), mark.number + 1
        value = str(number).encode()
        before = Unchanged(key, mark.revision) if mark.number else Absent(key)
        ops = [Put(key, value, mark.lease_id), *map(self._op, writes)]
        result = await self._etcd.txn([before], ops, [Get(key)], repeatable=True)
        if result.succeeded:
            return replace(mark, number=number, revision=result.revision)
        for found in result.reads[0]:
            if found.value == value:
                # Written at the first attempt, whose answer was lost.
                return replace(mark, number=number, revision=found.mod_revision)
        # The mark goes with its lease, too: LEASE_LOST is the plainer word then.
        await self.renew(mark.lease_id)
        raise _history_lost()

    async def check(self, mark: Mark) -> None:
        """Makes sure that etcd still has the mark. Raises AbortedError (HISTORY_LOST)."""
        found = (await self._etcd.range(Get(self._keys.stream(mark.stream_id)))).items
        if mark.number and [kv.mod_revision for kv in found] != [mark.revision]:
            raise _history_lost()

    async def purge(self, lease_id: int, pointers: Sequence[PointerId]) -> None:
        """Removes pointers that are still under the lease, then ends it; in steps, since a lease ends all at once."""
        for chunk in chunks([self._keys.pointer(pointer) for pointer in pointers]):
            if not await self._delete_under(lease_id, chunk):
                # Some have moved to another stream: one by one.
                for key in chunk:
                    await self._delete_under(lease_id, [key])
        await self._etcd.revoke(lease_id)

    async def remove(self, pointers: Sequence[PointerId]) -> int:
        """Removes pointers, whoever published them; returns how many there were."""
        removed = 0
        for chunk in chunks(list(dict.fromkeys(pointers))):
            result = await self._etcd.txn([], [Delete(self._keys.pointer(p)) for p in chunk], repeatable=True)
            removed += result.deleted
        return removed

    async def page(self, scope: str, size: int, token: str) -> tuple[tuple[Pointer, ...], str]:
        """Returns one page of pointers (of one scope unless it is empty) and the token of the next; "" for none.

        Raises InvalidArgumentError (PAGE_TOKEN_INVALID) for a token of another listing.
        """
        prefix = self._keys.scope(scope)
        start = _after(token, prefix) if token else prefix
        listing = await self._etcd.range(Get(start, prefix_end(prefix), limit=size))
        pointers = tuple(filter(None, map(self._records.read_pointer, listing.items)))
        return pointers, _token(listing.items[-1].key, prefix) if listing.more else ""

    async def _read(self, gets: Sequence[Get], timeout_s: float) -> Sequence[Sequence[KeyValue]]:
        try:
            return (await self._etcd.txn([], gets, repeatable=True, timeout_s=timeout_s)).reads
        except FailedPreconditionError:
            # A full etcd also refuses transactions that only read, but no ranges (etcd, api/v3rpc/quota.go).
            return [(await self._etcd.range(get, timeout_s=timeout_s)).items for get in gets]

    async def _delete_under(self, lease_id: int, keys: Sequence[bytes]) -> bool:
        compares = [LeaseIs(key, lease_id) for key in keys]
        return (await self._etcd.txn(compares, [Delete(key) for key in keys], repeatable=True)).succeeded

    def _op(self, write: Write) -> Op:
        match write:
            case Upsert(pointer, lease_id):
                return Put(self._keys.pointer(pointer), self._records.write_pointer(pointer), lease_id)
            case Removal(pointer_id):
                return Delete(self._keys.pointer(pointer_id))


def _history_lost() -> AbortedError:
    return AbortedError("HISTORY_LOST", "etcd no longer has what this stream wrote: publish all on a new one")


def _token(key: bytes, prefix: bytes) -> str:
    return base64.urlsafe_b64encode(key.removeprefix(prefix)).decode()


def _after(token: str, prefix: bytes) -> bytes:
    """Returns the first key after the one of the token."""
    try:
        rest = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise InvalidArgumentError("PAGE_TOKEN_INVALID", "page_token is not one of this listing") from error
    if len(rest) > _MAX_KEY_BYTES:
        raise InvalidArgumentError("PAGE_TOKEN_INVALID", "page_token is not one of this listing")
    return prefix + rest + b"\0"
