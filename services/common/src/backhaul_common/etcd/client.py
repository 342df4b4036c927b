"""The calls that Backhaul makes to etcd, and nothing else that etcd can do."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from backhaul_common.clock import Clock, SystemClock
from backhaul_common.errors import AbortedError, UnauthenticatedError, UnavailableError
from backhaul_common.etcd import failures
from backhaul_common.etcd.connection import Connection, Metadata
from backhaul_common.etcd.gathered import GatheredReads, Result
from backhaul_common.etcd.ops import Compare, Get, KeyValue, Op, from_kv, prefix_end, range_request, txn_request
from backhaul_common.etcd.stubs import rpc
from backhaul_common.etcd.undisturbed import LIFE_S, UndisturbedReads
from backhaul_common.tls import Identity

_PAGE = 250
"""Keys of one page: with values of up to 64 KiB it stays below the longest message (17 MiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """How to reach one etcd cluster."""

    endpoints: tuple[str, ...]
    """host:port each, IPv6 in brackets; tried in this order."""
    user: str = ""
    password: str = field(default="", repr=False)
    attempt_s: float = 1.0
    """Longest wait for one endpoint."""
    total_s: float = 3.0
    """Longest wait for an answer from any endpoint."""
    progress_s: float = 3.0
    """How often a watch asks for a sign of life."""
    silence_s: float = 10.0
    """Silence after which a watch moves to another endpoint."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as granted or renewed."""

    lease_id: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Listing:
    """A part of the key space at one revision."""

    items: tuple[KeyValue, ...]
    revision: int
    """Revision of the store when it was read."""
    more: bool
    """Whether the limit cut it short."""
    cluster_id: int = 0


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What the member at the endpoint in use says of itself and of the cluster's alarms."""

    version: str
    full: bool
    """Whether some member has run out of space (alarm NOSPACE): the cluster refuses all writes."""
    corrupt: bool
    """Whether some member's data differs from the others' (alarm CORRUPT)."""
    size_bytes: int = 0
    """Size of its database file."""
    revision: int = 0
    """Revision of its store."""


@dataclass(frozen=True, slots=True)
class TxnResult:
    """Outcome of a transaction."""

    succeeded: bool
    """Whether all comparisons held."""
    revision: int
    reads: tuple[tuple[KeyValue, ...], ...]
    """What each Get of the executed branch found, in order."""
    deleted: int
    """Keys that the executed branch deleted."""


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes up to one revision; without changes it is a sign of life."""

    revision: int
    upserts: tuple[KeyValue, ...] = ()
    removals: tuple[bytes, ...] = ()
    store_revision: int = 0
    """Revision of the store that sent it."""
    cluster_id: int = 0


class EtcdClient:
    """Async context manager over one etcd cluster; made inside the running event loop.

    Every method raises BackhaulError: UnavailableError (ETCD_UNAVAILABLE, ETCD_BUSY, ETCD_TLS), AbortedError
    (LEASE_LOST, ETCD_COMPACTED), FailedPreconditionError (ETCD_NO_SPACE), UnauthenticatedError (ETCD_AUTH),
    InternalError (ETCD_ERROR).
    No call takes longer than ``total_s``, or the ``timeout_s`` given with it.
    """

    def __init__(self, options: EtcdOptions, clock: Clock | None = None, *, tls: Identity | None = None) -> None:
        self._options = options
        self._connection = Connection(
            endpoints=options.endpoints,
            tls=tls,
            user=options.user,
            password=options.password,
            attempt_s=options.attempt_s,
            clock=clock or SystemClock(),
        )
        self._undisturbed = UndisturbedReads()
        self._reads = GatheredReads(self._send_reads)
        # One of each kind for each channel: making one takes longer than a call of it.
        self._stubs: dict[tuple[Any, grpc.aio.Channel], Any] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._reads.close()
        await self._undisturbed.close()
        await self._connection.close()

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._connection.endpoint

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Op],
        otherwise: Sequence[Op] = (),
        *,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> TxnResult:
        """Runs ``then`` when all ``compares`` hold, else ``otherwise``, atomically.

        ``repeatable``: doing it twice is as good as once, so it may go to another endpoint after a lost answer. A
        transaction that only reads is so by itself, and linearizable (etcd, server/etcdserver/v3_server.go, ``Txn``);
        it may share its way with others (`GatheredReads`), and goes on in etcd when its caller has gone
        (`UndisturbedReads`).
        """
        total_s = self._options.total_s if timeout_s is None else timeout_s
        gets = [op for op in then if isinstance(op, Get)]
        if not compares and len(gets) == len(then):
            return await self._read(gets, total_s)
        request = txn_request(compares, then, otherwise)
        if all(isinstance(op, Get) for op in (*then, *otherwise)):
            return _txn_result(await self._read_txn(request, total_s))
        return _txn_result(await self._unary(rpc.KVStub, "Txn", request, repeatable, timeout_s))

    async def _read(self, gets: Sequence[Get], timeout_s: float) -> TxnResult:
        try:
            result = await self._reads.read(gets, timeout_s)
        except TimeoutError as error:
            raise UnavailableError("ETCD_UNAVAILABLE", "etcd does not answer", endpoint=self.endpoint) from error
        return TxnResult(True, result.revision, result.reads, 0)

    async def _send_reads(self, gets: Sequence[Get], timeout_s: float) -> Result:
        result = _txn_result(await self._read_txn(txn_request((), gets), timeout_s))
        return Result(result.revision, result.reads)

    async def _read_txn(self, request: Any, timeout_s: float) -> Any:
        async def attempt(channel: grpc.aio.Channel, metadata: Metadata, left_s: float) -> Any:
            stub = self._stub(rpc.KVStub, channel)
            return await self._undisturbed.wait(lambda: stub.Txn(request, timeout=LIFE_S, metadata=metadata), left_s)

        return await self._connection.call(attempt, repeatable=True, total_s=timeout_s)

    async def range(self, get: Get, *, revision: int = 0, timeout_s: float | None = None) -> Listing:
        """Reads keys, linearizably; at ``revision`` when it is given."""
        answer = await self._unary(rpc.KVStub, "Range", range_request(get, revision), True, timeout_s)
        items = tuple(map(from_kv, answer.kvs))
        return Listing(items, answer.header.revision, bool(answer.more), answer.header.cluster_id)

    async def list_prefix(self, prefix: bytes, *, page_size: int = _PAGE) -> Listing:
        """Reads all keys that start with ``prefix``, page by page, as of one revision."""
        items: list[KeyValue] = []
        page = await self.range(Get(prefix, prefix_end(prefix), limit=page_size))
        revision = page.revision
        items.extend(page.items)
        while page.more:
            start = items[-1].key + b"\0"
            page = await self.range(Get(start, prefix_end(prefix), limit=page_size), revision=revision)
            items.extend(page.items)
        return Listing(tuple(items), revision, False, page.cluster_id)

    async def status(self, *, timeout_s: float | None = None) -> MemberStatus:
        """Asks the member in use for its version and the cluster's alarms."""
        answer = await self._unary(rpc.MaintenanceStub, "Status", rpc.StatusRequest(), True, timeout_s)
        # etcd, api/v3rpc/maintenance.go, ``Status``: alarms come as text such as "memberID:1 alarm:NOSPACE ".
        alarms = " ".join(answer.errors)
        return MemberStatus(
            answer.version, "alarm:NOSPACE" in alarms, "alarm:CORRUPT" in alarms, answer.dbSize, answer.header.revision
        )

    async def grant(self, ttl_s: float) -> Lease:
        """Makes a lease. A lost answer leaves one that nobody uses, until its TTL."""
        request = rpc.LeaseGrantRequest(TTL=max(1, round(ttl_s)))
        answer = await self._unary(rpc.LeaseStub, "LeaseGrant", request, True, None)
        return Lease(answer.ID, float(answer.TTL))

    async def keep_alive_once(self, lease_id: int, *, timeout_s: float | None = None) -> Lease:
        """Renews a lease. Raises AbortedError (LEASE_LOST) when it is gone."""

        async def attempt(channel: grpc.aio.Channel, metadata: Metadata, left_s: float) -> Any:
            call = self._stub(rpc.LeaseStub, channel).LeaseKeepAlive(timeout=left_s, metadata=metadata)
            try:
                await call.write(rpc.LeaseKeepAliveRequest(ID=lease_id))
                return await _read(call)
            finally:
                call.cancel()

        answer = await self._connection.call(attempt, repeatable=True, total_s=timeout_s or self._options.total_s)
        # etcd, server/etcdserver/api/v3rpc/lease.go: an unknown lease is answered with TTL 0, not with an error.
        if answer.TTL <= 0:
            raise AbortedError("LEASE_LOST", "etcd no longer knows the lease")
        return Lease(lease_id, float(answer.TTL))

    async def revoke(self, lease_id: int) -> None:
        """Ends a lease and deletes its keys; one that is gone is no error."""
        try:
            await self._unary(rpc.LeaseStub, "LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease_id), True, None)
        except AbortedError:
            return

    async def ttl_s(self, lease_id: int) -> float:
        """Returns the seconds that a lease has left. Raises AbortedError (LEASE_LOST) when it is gone."""
        request = rpc.LeaseTimeToLiveRequest(ID=lease_id)
        answer = await self._unary(rpc.LeaseStub, "LeaseTimeToLive", request, True, None)
        if answer.TTL <= 0:
            raise AbortedError("LEASE_LOST", "etcd no longer knows the lease")
        return float(answer.TTL)

    async def watch(self, prefix: bytes, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yields changes from ``start_revision`` on, and signs of life in between; ends only by raising.

        Close it (``contextlib.aclosing``) to end the watch in etcd. AbortedError (ETCD_COMPACTED) when the revision is
        gone. After UnavailableError the next watch goes to another endpoint.
        """
        index, channel, metadata = await self._connection.stream(self._options.total_s)
        # etcd, api/v3rpc/rpctypes/metadatafields.go: a member without leader ends the stream instead of being silent.
        call = rpc.WatchStub(channel).Watch(
            _watch_requests(prefix, start_revision, self._options.progress_s),
            metadata=(*metadata, ("hasleader", "true")),
        )
        try:
            while True:
                yield await self._next_batch(call)
        except grpc.aio.AioRpcError as error:
            if failures.endpoint_away(error):
                self._connection.leave(index)
            raise failures.to_backhaul(error, self.endpoint) from error
        except TimeoutError as error:
            self._connection.leave(index)
            raise UnavailableError("ETCD_UNAVAILABLE", "etcd's watch fell silent", endpoint=self.endpoint) from error
        finally:
            call.cancel()

    async def _next_batch(self, call: Any) -> WatchBatch:
        events: list[Any] = []
        while True:
            async with asyncio.timeout(self._options.silence_s):
                answer = await _read(call)
            if answer.canceled:
                self._canceled(answer)
            events.extend(answer.events)
            if not answer.fragment:
                return _batch(events, answer.header)

    def _canceled(self, answer: Any) -> None:
        """Raises what a cancelled watch means."""
        if answer.compact_revision:
            raise AbortedError("ETCD_COMPACTED", "etcd no longer has this revision")
        reason = answer.cancel_reason
        # etcd 3.5.1 says "permission denied" for an expired token too (server/etcdserver/api/v3rpc/watch.go,
        # isWatchPermitted); whether it is one, the next watch with a fresh token shows.
        if failures.token_expired(reason) or "permission denied" in reason:
            self._connection.reject_token()
            raise UnauthenticatedError("ETCD_AUTH", f"etcd refused the watch: {reason}", endpoint=self.endpoint)
        raise UnavailableError("ETCD_UNAVAILABLE", f"etcd ended the watch: {reason}", endpoint=self.endpoint)

    async def _unary(self, stub: Any, method: str, request: Any, repeatable: bool, timeout_s: float | None) -> Any:
        async def attempt(channel: grpc.aio.Channel, metadata: Metadata, left_s: float) -> Any:
            return await getattr(self._stub(stub, channel), method)(request, timeout=left_s, metadata=metadata)

        total_s = self._options.total_s if timeout_s is None else timeout_s
        return await self._connection.call(attempt, repeatable=repeatable, total_s=total_s)

    def _stub(self, kind: Any, channel: grpc.aio.Channel) -> Any:
        stub = self._stubs.get((kind, channel))
        if stub is None:
            stub = self._stubs[kind, channel] = kind(channel)
        return stub


async def _read(call: Any) -> Any:
    answer = await call.read()
    if answer is grpc.aio.EOF:
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNAVAILABLE, "the stream ended"
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    return answer


async def _watch_requests(prefix: bytes, start_revision: int, progress_s: float) -> AsyncIterator[Any]:
    yield rpc.WatchRequest(
        create_request=rpc.WatchCreateRequest(
            key=prefix, range_end=prefix_end(prefix), start_revision=start_revision, fragment=True
        )
    )
    while True:
        # etcd's own notifications come every ten minutes (server/embed/config.go): too seldom to tell a quiet etcd from
        # a dead one.
        await asyncio.sleep(progress_s)
        yield rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())


def _batch(events: Sequence[Any], header: Any) -> WatchBatch:
    """Takes the last event of each key.

    A watch that catches up gets old events under a new header, so the revision is that of the last event
    (etcd, client/v3/watch.go, ``serveSubstream``).
    """
    if not events:
        return WatchBatch(header.revision, (), (), header.revision, header.cluster_id)
    last = {event.kv.key: event for event in events}
    deleted = rpc.Event.DELETE
    upserts = tuple(from_kv(event.kv) for event in last.values() if event.type != deleted)
    removals = tuple(event.kv.key for event in last.values() if event.type == deleted)
    return WatchBatch(events[-1].kv.mod_revision, upserts, removals, header.revision, header.cluster_id)


def _txn_result(answer: Any) -> TxnResult:
    reads = tuple(
        tuple(map(from_kv, response.response_range.kvs))
        for response in answer.responses
        if response.HasField("response_range")
    )
    deleted = sum(response.response_delete_range.deleted for response in answer.responses)
    return TxnResult(bool(answer.succeeded), answer.header.revision, reads, deleted)
