"""What goes into an etcd transaction and what comes out, as values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backhaul_common.etcd.stubs import rpc


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as etcd holds it."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int
    """0 without lease."""


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key under a lease (0: none)."""

    key: bytes
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes one key."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Get:
    """Reads one key, or all keys in [key, end) when ``end`` is given."""

    key: bytes
    end: bytes = b""
    limit: int = 0
    """0: no limit."""
    newest_first: bool = False
    """By the revision at which a key was created, descending; else by key."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Holds while the key does not exist."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Holds while the key was last written at ``mod_revision``."""

    key: bytes
    mod_revision: int


@dataclass(frozen=True, slots=True)
class LeaseIs:
    """Holds while the key exists under this lease."""

    key: bytes
    lease_id: int


Op = Put | Delete | Get
Compare = Absent | Unchanged | LeaseIs


def prefix_end(prefix: bytes) -> bytes:
    """Returns the end of the range of all keys that start with ``prefix``, which must not be all 0xff."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1])


def range_request(op: Get, revision: int = 0) -> Any:
    """Returns a linearizable read of the newest state, or of ``revision``."""
    request = rpc.RangeRequest(revision=revision)
    _fill_range(request, op)
    return request


def txn_request(compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()) -> Any:
    """Returns the transaction as etcd wants it."""
    request = rpc.TxnRequest(compare=map(_to_compare, compares))
    for ops, to in ((then, request.success), (otherwise, request.failure)):
        for op in ops:
            _fill_op(to.add(), op)
    return request


def _fill_op(request: Any, op: Op) -> None:
    # Filled in place: what is made apart is copied, and thousands a second are sent.
    match op:
        case Put(key, value, lease_id):
            put = request.request_put
            put.key, put.value, put.lease = key, value, lease_id
        case Delete(key):
            request.request_delete_range.key = key
        case Get():
            _fill_range(request.request_range, op)


def _fill_range(request: Any, op: Get) -> None:
    request.key, request.range_end, request.limit = op.key, op.end, op.limit
    if op.newest_first:
        request.sort_order = rpc.RangeRequest.DESCEND
        request.sort_target = rpc.RangeRequest.CREATE


def _to_compare(compare: Compare) -> Any:
    match compare:
        case Absent(key):
            return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=0)
        case Unchanged(key, mod_revision):
            return rpc.Compare(key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=mod_revision)
        case LeaseIs(key, lease_id):
            return rpc.Compare(key=key, target=rpc.Compare.LEASE, result=rpc.Compare.EQUAL, lease=lease_id)


def from_kv(kv: Any) -> KeyValue:
    """Takes a key from an answer."""
    return KeyValue(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)
