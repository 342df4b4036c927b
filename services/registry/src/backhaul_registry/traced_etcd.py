"""Spans around etcd calls that belong to a request, background calls make none; and how long all of them take."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from backhaul_common.attributes import DB_SYSTEM, ETCD_KEY_COUNT, ETCD_REVISION
from backhaul_common.etcd import Compare, EtcdClient, Get, Lease, Listing, Op, TxnResult, WatchBatch
from backhaul_registry.observing import EtcdCalls


class TracedEtcd:
    """An `EtcdClient` whose calls are child spans of the current one."""

    def __init__(self, etcd: EtcdClient) -> None:
        self._etcd = etcd
        self._tracer = trace.get_tracer("backhaul_registry.etcd")
        self._measured = EtcdCalls(time.perf_counter)

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Op],
        otherwise: Sequence[Op] = (),
        *,
        repeatable: bool = False,
        timeout_s: float | None = None,
    ) -> TxnResult:
        """Runs a transaction."""
        with self._span("etcd.txn") as span:
            result = await self._etcd.txn(compares, then, otherwise, repeatable=repeatable, timeout_s=timeout_s)
            span.set_attributes({ETCD_KEY_COUNT: len(then), ETCD_REVISION: result.revision})
            return result

    async def range(self, get: Get, *, revision: int = 0, timeout_s: float | None = None) -> Listing:
        """Reads keys."""
        with self._span("etcd.range") as span:
            listing = await self._etcd.range(get, revision=revision, timeout_s=timeout_s)
            span.set_attributes({ETCD_KEY_COUNT: len(listing.items), ETCD_REVISION: listing.revision})
            return listing

    async def list_prefix(self, prefix: bytes) -> Listing:
        """Reads a whole prefix."""
        with self._span("etcd.list") as span:
            listing = await self._etcd.list_prefix(prefix)
            span.set_attributes({ETCD_KEY_COUNT: len(listing.items), ETCD_REVISION: listing.revision})
            return listing

    async def grant(self, ttl_s: float) -> Lease:
        """Makes a lease."""
        with self._span("etcd.lease_grant"):
            return await self._etcd.grant(ttl_s)

    async def keep_alive_once(self, lease_id: int) -> Lease:
        """Renews a lease."""
        with self._span("etcd.lease_keep_alive"):
            return await self._etcd.keep_alive_once(lease_id)

    async def revoke(self, lease_id: int) -> None:
        """Ends a lease."""
        with self._span("etcd.lease_revoke"):
            await self._etcd.revoke(lease_id)

    def watch(self, prefix: bytes, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Watches a prefix; no request waits for it, so there is no span."""
        return self._etcd.watch(prefix, start_revision)

    @contextmanager
    def _span(self, name: str) -> Iterator[Span]:
        with self._measured.measured(name.removeprefix("etcd.")), self._traced(name) as span:
            yield span

    @contextmanager
    def _traced(self, name: str) -> Iterator[Span]:
        if not trace.get_current_span().get_span_context().is_valid:
            yield trace.INVALID_SPAN
            return
        with self._tracer.start_as_current_span(name, kind=SpanKind.CLIENT, attributes={DB_SYSTEM: "etcd"}) as span:
            yield span
