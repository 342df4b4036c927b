"""gRPC face of the index of block set pointers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from opentelemetry import trace

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul.registry.v1.registry_pb2_grpc import IndexServiceServicer
from backhaul_common.attributes import POINTER_COUNT
from backhaul_common.durations import duration
from backhaul_common.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from backhaul_common.metering import Counter, Level
from backhaul_registry import convert, instruments
from backhaul_registry.core import rules
from backhaul_registry.core.feed import Change
from backhaul_registry.core.model import Pointer
from backhaul_registry.etcd_store import PointerStore
from backhaul_registry.hub import Hub
from backhaul_registry.node_service import LIFE_SIGN_S
from backhaul_registry.publishing import PublishStream
from backhaul_registry.together import refuse_after, run_until_first

Context = Any

FIND_S = 2.0
"""Longest search, when the caller sets no shorter deadline."""

_CANCELLATION_S = 0.1
"""Time within which a broken stream shows itself as cancelled."""

_MARGIN_S = 0.005
"""Time kept for the way back to the caller."""

_OVER_S = _MARGIN_S + 0.001
"""With no more than this left of the caller's time a search has had all of it: clocks differ by a little."""


class IndexService(IndexServiceServicer):
    """Finds, keeps, removes, lists and watches pointers.

    Streams are plain coroutines that write to the context, so that all their tasks end inside the call. gRPC allows
    that (grpc.aio, ``ServicerContext.write``), but the generated base class is typed for generators only: the type
    checker is told to ignore the difference.
    """

    def __init__(
        self,
        store: PointerStore,
        hub: Hub[Pointer],
        stopping: asyncio.Event,
        *,
        ttl_s: float,
        etcd_answers: Callable[[], bool],
    ) -> None:
        self._store = store
        self._hub = hub
        self._stopping = stopping
        self._ttl_s = ttl_s
        self._etcd_answers = etcd_answers
        self._lookups = Counter(instruments.LOOKUPS)
        self._changes = Counter(instruments.POINTER_CHANGES)
        self._publishers = Level(instruments.PUBLISHERS)

    async def FindBlockSets(self, request: pb.FindBlockSetsRequest, context: Context) -> pb.FindBlockSetsResponse:
        """Returns the pointers under the keys, within the caller's deadline."""
        rules.check_keys(request.scope, request.keys)
        pointers = await self._find(request, context)
        trace.get_current_span().set_attribute(POINTER_COUNT, len(pointers))
        self._lookups.add(1, "found" if pointers else "nothing")
        return pb.FindBlockSetsResponse(pointers=map(convert.pointer_to_proto, pointers))

    async def _find(self, request: pb.FindBlockSetsRequest, context: Context) -> Sequence[Pointer]:
        """Raises DeadlineExceededError (TIMED_OUT) when etcd answers, but not within the caller's time."""
        try:
            return await self._store.find(request.scope, request.keys, timeout_s=_budget_s(context))
        except UnavailableError as error:
            left_s = context.time_remaining()
            if left_s is None or left_s > _OVER_S or not self._etcd_answers():
                raise
            raise DeadlineExceededError("TIMED_OUT", "etcd did not answer within the caller's time") from error

    async def PublishBlockSets(  # type: ignore[override]  # it writes; the stub only knows handlers that yield
        self, request_iterator: AsyncIterator[pb.PublishBlockSetsRequest], context: Context
    ) -> None:
        """Keeps the pointers of one engine for as long as its agent says so."""
        await run_until_first(self._publish(request_iterator, context), refuse_after(self._stopping))

    async def RemoveBlockSets(self, request: pb.RemoveBlockSetsRequest, context: Context) -> pb.RemoveBlockSetsResponse:
        """Removes pointers by id."""
        ids = [convert.pointer_id_from_proto(message) for message in request.pointers]
        rules.check_batch((), ids)
        return pb.RemoveBlockSetsResponse(removed_count=await self._store.remove(ids))

    async def ListBlockSets(self, request: pb.ListBlockSetsRequest, context: Context) -> pb.ListBlockSetsResponse:
        """Returns one page."""
        if request.scope:
            rules.check_id(request.scope, "scope")
        size = rules.page_size(request.page_size)
        pointers, token = await self._store.page(request.scope, size, request.page_token)
        return pb.ListBlockSetsResponse(pointers=map(convert.pointer_to_proto, pointers), next_page_token=token)

    async def WatchBlockSets(  # type: ignore[override]  # it writes; the stub only knows handlers that yield
        self, request: pb.WatchBlockSetsRequest, context: Context
    ) -> None:
        """Tells one client about all changes of a scope, or of all."""
        if request.scope:
            rules.check_id(request.scope, "scope")
        await run_until_first(self._watch(request, context), refuse_after(self._stopping))

    async def _watch(self, request: pb.WatchBlockSetsRequest, context: Context) -> None:
        scope = request.scope
        with self._hub.watching():
            subscription = await self._hub.subscribe(request.start_revision, request.start_digest)
            try:
                for message in convert.pointers_opening(subscription.opening, scope):
                    await context.write(message)
                for change in subscription.opening.missed:
                    await self._tell(change, scope, context)
                while True:
                    news = await subscription.next(LIFE_SIGN_S)
                    await self._tell(news or self._hub.quiet(), scope, context)
            finally:
                self._hub.unsubscribe(subscription)

    async def _tell(self, change: Change[Pointer], scope: str, context: Context) -> None:
        for message in convert.pointers_change(change, scope):
            # Other scopes' changes are no news for this client.
            if message.HasField("change") or not (change.upserts or change.removals):
                await context.write(message)

    async def _publish(self, requests: AsyncIterator[pb.PublishBlockSetsRequest], context: Context) -> None:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        if first.WhichOneof("step") != "open":
            raise InvalidArgumentError("OPEN_EXPECTED", "the first message must be open")
        rules.check_id(first.open.node_id, "node_id")
        rules.check_text(first.open.engine_id, "engine_id", required=True)
        stream = PublishStream(self._store, first.open.node_id, first.open.engine_id, ttl_s=self._ttl_s)
        ttl_s = await stream.open()
        opened = pb.PublishBlockSetsResponse.Opened(ttl=duration(ttl_s))
        await context.write(pb.PublishBlockSetsResponse(opened=opened))
        self._publishers.add(1)
        try:
            await run_until_first(self._take_batches(stream, requests, context), stream.keep_leases())
        finally:
            self._publishers.add(-1)
        # gRPC ends the iteration for a client that vanished too; the cancellation that tells it apart may come later.
        await asyncio.sleep(_CANCELLATION_S)
        if not context.cancelled():
            await stream.purge()

    async def _take_batches(
        self, stream: PublishStream, requests: AsyncIterator[pb.PublishBlockSetsRequest], context: Context
    ) -> None:
        async for request in requests:
            if request.WhichOneof("step") != "batch":
                raise InvalidArgumentError("STEP_UNEXPECTED", "after open come batches")
            batch = request.batch
            upserts = tuple(map(convert.pointer_from_proto, batch.upserts))
            removals = tuple(map(convert.pointer_id_from_proto, batch.removals))
            await stream.take(batch.nonce, upserts, removals)
            self._changes.add(len(upserts), "written")
            self._changes.add(len(removals), "removed")
            acknowledged = pb.PublishBlockSetsResponse.Acknowledged(nonce=batch.nonce)
            await context.write(pb.PublishBlockSetsResponse(acknowledged=acknowledged))


def _budget_s(context: Context) -> float:
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return FIND_S
    if remaining_s <= _MARGIN_S:
        raise DeadlineExceededError("TIMED_OUT", "no time left to search")
    return min(FIND_S, float(remaining_s) - _MARGIN_S)
