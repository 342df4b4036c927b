"""The pointers of one engine: a `PublishBlockSets` stream that reconnects for ever; every wait has a limit."""

import asyncio
import contextlib

import grpc
import structlog

from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_common.clock import Clock
from backhaul_common.errors import BackhaulError, UnavailableError
from backhaul_common.metering import Counter
from backhaul_node_agent import convert, instruments
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.registries import Registries, end_of, exchange, pauses_between_attempts

_log = structlog.get_logger(__name__)

_ANSWER_S = 2.0

PublishCall = grpc.aio.StreamStreamCall[registry_pb2.PublishBlockSetsRequest, registry_pb2.PublishBlockSetsResponse]


class Publisher:
    """Publishes the pointers of one engine incarnation while the node is joined.

    Keeps what should be published; each new stream starts with all of it. One batch is on its way at a time: changes
    that come meanwhile are merged by set and go together. The registry writes batches one after the other anyway, and
    many changes are written as fast as one.
    """

    MAX_POINTERS = 100
    """Pointers to write or remove in one batch, give or take one set's.

    As many as a registry writes in one transaction: an etcd that is slow has the time of an answer for each.
    """
    MAX_REMOVALS = 10_000
    """Removals kept for the next stream; beyond, the oldest are left to the lease of the stream that wrote them.

    A stream that is open is sent all of them: sets are not freed before.
    """

    def __init__(
        self, *, registries: Registries, node_id: str, engine_id: str, clock: Clock, joined: asyncio.Event
    ) -> None:
        self._registries = registries
        self._node_id = node_id
        self._engine_id = engine_id
        self._clock = clock
        self._joined = joined
        # Sets, not their pointers: the owner has them anyway.
        self._wanted: dict[str, BlockSet] = {}
        self._removals: dict[str, BlockSet] = {}
        # Sets to send, oldest first; dicts keep the order and merge changes of one set.
        self._dirty: dict[str, None] = {}
        self._in_flight: list[str] = []
        """Sets of the batch that is on its way; none: there is no such batch."""
        self._sent_at = 0.0
        self._nonce = 0
        """Of that batch, or the last one."""
        self._work = asyncio.Event()
        self._streaming = False
        """Whether the owner waits for removals, as it does from `PublisherUp` to `PublisherDown`."""
        self._closing = False
        self._breaks = Counter(instruments.PUBLISH_BREAKS)
        self._last_failure = ""
        """Why the last attempt failed, until a batch was acknowledged; logged when it changes."""

    def publish(self, block_set: BlockSet) -> None:
        """Wants a set's pointers written."""
        self._wanted[block_set.set_id] = block_set
        self._removals.pop(block_set.set_id, None)
        self._touch(block_set.set_id)

    def unpublish(self, block_set: BlockSet) -> None:
        """Wants a set's pointers removed."""
        self._wanted.pop(block_set.set_id, None)
        self._removals[block_set.set_id] = block_set
        self._touch(block_set.set_id)
        self._bound_removals()

    def close(self) -> None:
        """Ends the pointers and then `run`: the engine is gone."""
        self._closing = True
        self.wake()

    def wake(self) -> None:
        """Looks at once whether there is something to do."""
        self._work.set()

    async def run(self, hear: ev.Hear) -> None:
        """Publishes until closed or cancelled."""
        pauses = pauses_between_attempts()
        while not await self._closed_before_joined():
            channel = self._registries.channel
            call: PublishCall = registry_pb2_grpc.IndexServiceStub(channel).PublishBlockSets()
            try:
                await self._open(call)
                pauses = pauses_between_attempts()
                await self._stay_open(call, hear)
            except* BackhaulError as group:
                self._note_failure(group)
                self._registries.give_up(channel)
            except* Exception as group:  # noqa: BLE001  # one engine's pointers must not end the agent
                _log.error("publishing failed", engine=self._engine_id, exc_info=group)
            finally:
                call.cancel()
                self._streaming = False
                self._bound_removals()
                hear(ev.PublisherDown(self._engine_id))
            if not self._closing:
                await self._clock.sleep(next(pauses))

    def _note_failure(self, group: BaseExceptionGroup[BackhaulError]) -> None:
        self._breaks.add(1)
        error = group.exceptions[0]
        reason = error.reason if isinstance(error, BackhaulError) else ""
        if reason != self._last_failure:
            _log.warning("publishing interrupted", engine=self._engine_id, error=str(error))
        self._last_failure = reason

    async def _closed_before_joined(self) -> bool:
        while not self._joined.is_set() and not self._closing:
            waits = [asyncio.ensure_future(self._joined.wait()), asyncio.ensure_future(self._work.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if not self._closing:
                self._work.clear()
        return self._closing

    async def _open(self, call: PublishCall) -> None:
        first = registry_pb2.PublishBlockSetsRequest()
        first.open.node_id, first.open.engine_id = self._node_id, self._engine_id
        await _write(call, first)
        answer = await _read(call, _ANSWER_S)
        if answer is None or answer.WhichOneof("step") != "opened":
            raise UnavailableError("REGISTRY_CONFUSED", "the registry did not confirm the stream")

    async def _stay_open(self, call: PublishCall, hear: ev.Hear) -> None:
        self._in_flight = []
        self._nonce = 0
        self._dirty = dict.fromkeys([*self._removals, *self._wanted])
        self._work.set()
        self._streaming = True
        hear(ev.PublisherUp(self._engine_id))
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read_acknowledgements(call, hear))
            await self._write_batches(call)
            # Half-closed, the registry ends the pointers and then the stream. Cancelling the reader would break it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await call.done_writing()
                    await asyncio.wait([reading])
            reading.cancel()

    async def _write_batches(self, call: PublishCall) -> None:
        """Sends what is dirty, until closed or no longer joined."""
        while not self._closing and self._joined.is_set():
            if self._dirty and not self._in_flight:
                self._nonce += 1
                request, self._in_flight = self._next_batch(self._nonce)
                self._sent_at = self._clock.monotonic()
                await _write(call, request)
                continue
            self._work.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await self._work.wait()
            if self._in_flight and self._clock.monotonic() - self._sent_at > _ANSWER_S:
                raise UnavailableError("REGISTRY_SILENT", "the registry does not acknowledge")

    def _next_batch(self, nonce: int) -> tuple[registry_pb2.PublishBlockSetsRequest, list[str]]:
        request = registry_pb2.PublishBlockSetsRequest()
        request.batch.nonce = nonce
        set_ids: list[str] = []
        count = 0
        while self._dirty and count < self.MAX_POINTERS:
            set_id = next(iter(self._dirty))
            del self._dirty[set_id]
            set_ids.append(set_id)
            upserts, removals = self._pointers(self._wanted.get(set_id)), self._pointers(self._removals.get(set_id))
            request.batch.upserts.extend(upserts)
            request.batch.removals.extend(removals)
            count += len(upserts) + len(removals)
        return request, set_ids

    def _pointers(self, block_set: BlockSet | None) -> list[registry_pb2.BlockSetPointer]:
        if block_set is None:
            return []
        return convert.pointers(block_set, node_id=self._node_id, engine_id=self._engine_id)

    async def _read_acknowledgements(self, call: PublishCall, hear: ev.Hear) -> None:
        """Reads until the registry ends a half-closed stream. Raises BackhaulError when it ends another one."""
        while (answer := await _read(call, None)) is not None:
            if answer.acknowledged.nonce != self._nonce:
                continue
            settled = [set_id for set_id in self._in_flight if set_id not in self._dirty]
            self._in_flight = []
            removed = [set_id for set_id in settled if set_id in self._removals]
            written = [set_id for set_id in settled if set_id in self._wanted]
            if written:
                hear(ev.PointersWritten(self._engine_id, written))
            for set_id in removed:
                del self._removals[set_id]
            if removed:
                hear(ev.PointersRemoved(self._engine_id, removed))
            self._work.set()
            self._last_failure = ""
        if not self._closing and self._joined.is_set():
            raise UnavailableError("STREAM_ENDED", "the registry ended the stream")

    def _bound_removals(self) -> None:
        while not self._streaming and len(self._removals) > self.MAX_REMOVALS:
            oldest = next(iter(self._removals))
            del self._removals[oldest]
            self._dirty.pop(oldest, None)

    def _touch(self, set_id: str) -> None:
        self._dirty[set_id] = None
        # Else the acknowledgement wakes.
        if not self._in_flight:
            self.wake()


async def _write(call: PublishCall, request: registry_pb2.PublishBlockSetsRequest) -> None:
    async with exchange(call, _ANSWER_S):
        await call.write(request)


async def _read(call: PublishCall, timeout_s: float | None) -> registry_pb2.PublishBlockSetsResponse | None:
    """Returns the next message, None at the end of a stream that ended well. Raises BackhaulError for others."""
    async with exchange(call, timeout_s):
        answer = await call.read()
        if isinstance(answer, registry_pb2.PublishBlockSetsResponse):
            return answer
        if await call.code() is grpc.StatusCode.OK:
            return None
        raise await end_of(call)
