"""The agent's side of the registry: the node's lease, and the pointers of each engine.

Both are streams that reconnect for ever, moving from one registry address to the next; every wait has a limit.
"""

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import grpc
import structlog

from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_common.clock import Clock
from backhaul_common.errors import AbortedError, AlreadyExistsError, BackhaulError, UnavailableError
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_node_agent import convert
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet

_log = structlog.get_logger(__name__)

Hear = Callable[[ev.Event], None]

_ANSWER_S = 2.0
_LEAVE_S = 1.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0

JoinCall = grpc.aio.StreamStreamCall[registry_pb2.JoinNodeRequest, registry_pb2.JoinNodeResponse]
PublishCall = grpc.aio.StreamStreamCall[registry_pb2.PublishBlockSetsRequest, registry_pb2.PublishBlockSetsResponse]


class Registries:
    """Channels to all registries, one of them current. Owned by its context."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [open_channel(address) for address in addresses]
        self._current = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        """Channel to the current registry."""
        return self._channels[self._current]

    def give_up(self, channel: grpc.aio.Channel) -> None:
        """Moves on to the next registry, unless somebody did already."""
        if channel is self.channel:
            self._current = (self._current + 1) % len(self._channels)


def _pauses() -> Iterator[float]:
    """Yields jittered pauses between attempts, growing."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


class NodeSession:
    """Keeps the node joined.

    The lease counts from the time of sending the last answered message; the core hears of each answer, and of the loss.
    """

    def __init__(
        self, *, registries: Registries, ttl_s: float, margin_s: float, clock: Clock, on_taken: Callable[[], None]
    ) -> None:
        """`margin_s` is taken off the lease's time; `on_taken` is called when another session took the node over."""
        self._registries = registries
        self._ttl_s = ttl_s
        self._margin_s = margin_s
        self._clock = clock
        self._on_taken = on_taken
        self._node: registry_pb2.Node | None = None
        self._sent_node: registry_pb2.Node | None = None
        self._changed = asyncio.Event()
        self._leaving = False
        self._left = asyncio.Event()
        self._lease_id = 0
        self._expires_at = 0.0
        self._holding = False
        self._last_failure = ""
        self.joined = asyncio.Event()
        """Set while the node is joined."""

    def update(self, node: registry_pb2.Node) -> None:
        """Gives the node's record as it is now; the first one lets the session begin."""
        if node != self._node:
            self._node = node
            self._changed.set()

    async def leave(self) -> None:
        """Removes the node, for at most a second; else its lease ends by itself."""
        self._leaving = True
        self._changed.set()
        if self._holding:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._left.wait()

    async def run(self, hear: Hear) -> None:
        """Keeps joining until cancelled or `leave` is answered."""
        while self._node is None:
            await self._changed.wait()
            self._changed.clear()
        pauses = _pauses()
        while not self._left.is_set():
            channel, before = self._registries.channel, self._expires_at
            try:
                await self._attend(channel, hear)
            except BackhaulError as error:
                self._note_failure(error, channel, hear)
            if self._expires_at != before:
                pauses = _pauses()
            if not self._left.is_set():
                await self._clock.sleep(next(pauses))

    def _note_failure(self, error: BackhaulError, channel: grpc.aio.Channel, hear: Hear) -> None:
        if error.reason != self._last_failure:
            _log.warning("node session interrupted", reason=error.reason, error=error.message)
        self._last_failure = error.reason
        taken, lost = isinstance(error, AlreadyExistsError), isinstance(error, AbortedError)
        if taken or lost or self._clock.monotonic() >= self._expires_at:
            self._lose(hear, taken=taken)
        if not taken and not lost:
            self._registries.give_up(channel)

    def _lose(self, hear: Hear, *, taken: bool) -> None:
        self._lease_id = 0
        self.joined.clear()
        if self._holding:
            self._holding = False
            hear(ev.LeaseLost())
            if taken:
                self._on_taken()

    async def _attend(self, channel: grpc.aio.Channel, hear: Hear) -> None:
        """Joins and stays joined on one stream. Raises BackhaulError when it ends."""
        stub = registry_pb2_grpc.NodeServiceStub(channel)
        call: JoinCall = stub.JoinNode()
        # A stream that ends between two messages is noticed at once.
        call.add_done_callback(lambda _: self._changed.set())
        try:
            for sequence in itertools.count(1):
                request = self._next_request(sequence)
                due = await self._exchange(call, request, hear)
                if self._left.is_set():
                    return
                await self._wait_until(due)
        finally:
            call.cancel()

    def _next_request(self, sequence: int) -> registry_pb2.JoinNodeRequest:
        assert self._node is not None
        request = registry_pb2.JoinNodeRequest(sequence=sequence)
        self._changed.clear()
        if sequence == 1:
            self._sent_node = self._node
            request.join.CopyFrom(
                registry_pb2.JoinNodeRequest.Join(
                    node=self._node, ttl=convert.duration(self._ttl_s), lease_id=self._lease_id
                )
            )
        elif self._leaving:
            request.leave.SetInParent()
        elif self._node != self._sent_node:
            self._sent_node = self._node
            request.update.node.CopyFrom(self._node)
        else:
            request.keep_alive.SetInParent()
        return request

    async def _exchange(self, call: JoinCall, request: registry_pb2.JoinNodeRequest, hear: Hear) -> float:
        """Sends one message and waits for its answer. Returns when the next one is due."""
        sent = self._clock.monotonic()
        answer = await _answer(call, request, self._ttl_s / 3)
        if answer.sequence != request.sequence:
            raise UnavailableError("REGISTRY_CONFUSED", "the registry answered another message")
        step = answer.WhichOneof("step")
        if step == "left":
            self._left.set()
            self._lose(hear, taken=False)
            return sent
        ttl_s = convert.seconds(answer.ttl)
        new = step == "joined" and answer.joined.lease_id != self._lease_id
        if step == "joined":
            self._lease_id = answer.joined.lease_id
            _log.info("node joined", new_lease=new, ttl_s=ttl_s)
        self._expires_at = sent + ttl_s
        self._holding, self._last_failure = True, ""
        hear(ev.LeaseHeld(self._expires_at - self._margin_s, joined=new))
        self.joined.set()
        return sent + ttl_s / 3

    async def _wait_until(self, due: float) -> None:
        remaining = due - self._clock.monotonic()
        if remaining > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._changed.wait()


async def _answer(
    call: JoinCall, request: registry_pb2.JoinNodeRequest, timeout_s: float
) -> registry_pb2.JoinNodeResponse:
    """Sends one message and waits for the answer. Raises BackhaulError when there is none in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(request)
            answer = await call.read()
            if isinstance(answer, registry_pb2.JoinNodeResponse):
                return answer
            raise await _end_of(call)
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    except asyncio.InvalidStateError as error:
        raise await _end_of(call) from error
    except TimeoutError as error:
        raise UnavailableError("REGISTRY_SILENT", "the registry does not answer") from error


async def _end_of(call: JoinCall | PublishCall) -> BackhaulError:
    """Returns why a stream has ended."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return UnavailableError("STREAM_ENDED", "the registry ended the stream")
    initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
    return to_error(grpc.aio.AioRpcError(code, initial, trailing, await call.details()))


class Publisher:
    """Publishes the pointers of one engine incarnation while the node is joined.

    Keeps what should be published; each new stream starts with all of it.
    """

    MAX_IN_FLIGHT = 4
    """Batches sent but not acknowledged; when they are all out, changes wait and are merged by set."""
    MAX_POINTERS = 500
    """Pointers to write or remove in one batch, give or take one set's."""
    MAX_REMOVALS = 10_000
    """Removals kept for the next stream; beyond, the oldest are left to the lease of the stream that wrote them."""

    def __init__(
        self, *, registries: Registries, node_id: str, engine_id: str, clock: Clock, joined: asyncio.Event
    ) -> None:
        self._registries = registries
        self._node_id = node_id
        self._engine_id = engine_id
        self._clock = clock
        self._joined = joined
        self._wanted: dict[str, list[registry_pb2.BlockSetPointer]] = {}
        self._removals: dict[str, list[registry_pb2.BlockSetPointer]] = {}
        # Sets to send, oldest first; dicts keep the order and merge changes of one set.
        self._dirty: dict[str, None] = {}
        self._in_flight: dict[int, tuple[float, list[str]]] = {}
        self._nonces = itertools.count(1)
        self._work = asyncio.Event()
        self._closing = False

    def publish(self, block_set: BlockSet) -> None:
        """Wants a set's pointers written."""
        self._wanted[block_set.set_id] = convert.pointers(block_set, node_id=self._node_id, engine_id=self._engine_id)
        self._removals.pop(block_set.set_id, None)
        self._touch(block_set.set_id)

    def unpublish(self, block_set: BlockSet) -> None:
        """Wants a set's pointers removed."""
        self._wanted.pop(block_set.set_id, None)
        self._removals[block_set.set_id] = convert.pointers(block_set, node_id=self._node_id, engine_id=self._engine_id)
        if len(self._removals) > self.MAX_REMOVALS:
            oldest = next(iter(self._removals))
            del self._removals[oldest]
            self._dirty.pop(oldest, None)
        self._touch(block_set.set_id)

    def close(self) -> None:
        """Ends the pointers and then `run`: the engine is gone."""
        self._closing = True
        self.wake()

    def wake(self) -> None:
        """Looks at once whether there is something to do."""
        self._work.set()

    async def run(self, hear: Hear) -> None:
        """Publishes until closed or cancelled."""
        pauses = _pauses()
        while not await self._closed_before_joined():
            channel = self._registries.channel
            call: PublishCall = registry_pb2_grpc.IndexServiceStub(channel).PublishBlockSets()
            try:
                await self._open(call)
                pauses = _pauses()
                await self._stay_open(call, hear)
            except* BackhaulError as group:
                _log.warning("publishing interrupted", engine=self._engine_id, error=str(group.exceptions[0]))
                self._registries.give_up(channel)
            except* Exception as group:  # noqa: BLE001  # one engine's pointers must not end the agent
                _log.error("publishing failed", engine=self._engine_id, exc_info=group)
            finally:
                call.cancel()
                hear(ev.PublisherDown(self._engine_id))
            if not self._closing:
                await self._clock.sleep(next(pauses))

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

    async def _stay_open(self, call: PublishCall, hear: Hear) -> None:
        self._in_flight.clear()
        self._nonces = itertools.count(1)
        self._dirty = dict.fromkeys([*self._removals, *self._wanted])
        self._work.set()
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
            if self._dirty and len(self._in_flight) < self.MAX_IN_FLIGHT:
                nonce = next(self._nonces)
                request, set_ids = self._next_batch(nonce)
                self._in_flight[nonce] = (self._clock.monotonic(), set_ids)
                await _write(call, request)
                continue
            self._work.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await self._work.wait()
            oldest = min((sent for sent, _ in self._in_flight.values()), default=math.inf)
            if self._clock.monotonic() - oldest > _ANSWER_S:
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
            upserts, removals = self._wanted.get(set_id, []), self._removals.get(set_id, [])
            request.batch.upserts.extend(upserts)
            request.batch.removals.extend(removals)
            count += len(upserts) + len(removals)
        return request, set_ids

    async def _read_acknowledgements(self, call: PublishCall, hear: Hear) -> None:
        """Reads until the registry ends a half-closed stream. Raises BackhaulError when it ends another one."""
        while (answer := await _read(call, None)) is not None:
            _, set_ids = self._in_flight.pop(answer.acknowledged.nonce, (0.0, []))
            pending = {set_id for _, later in self._in_flight.values() for set_id in later} | self._dirty.keys()
            removed = [set_id for set_id in set_ids if set_id in self._removals and set_id not in pending]
            for set_id in removed:
                del self._removals[set_id]
            if removed:
                hear(ev.PointersRemoved(self._engine_id, removed))
            self._work.set()
        if not self._closing and self._joined.is_set():
            raise UnavailableError("STREAM_ENDED", "the registry ended the stream")

    def _touch(self, set_id: str) -> None:
        self._dirty[set_id] = None
        self.wake()


async def _write(call: PublishCall, request: registry_pb2.PublishBlockSetsRequest) -> None:
    try:
        async with asyncio.timeout(_ANSWER_S):
            await call.write(request)
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    except asyncio.InvalidStateError as error:
        raise await _end_of(call) from error
    except TimeoutError as error:
        raise UnavailableError("REGISTRY_SILENT", "the registry takes nothing") from error


async def _read(call: PublishCall, timeout_s: float | None) -> registry_pb2.PublishBlockSetsResponse | None:
    """Returns the next message, None at the end of a stream that ended well. Raises BackhaulError for others."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await call.read()
            if isinstance(answer, registry_pb2.PublishBlockSetsResponse):
                return answer
            if await call.code() is grpc.StatusCode.OK:
                return None
            raise await _end_of(call)
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    except TimeoutError as error:
        raise UnavailableError("REGISTRY_SILENT", "the registry does not answer") from error


class Publishers:
    """One publisher per engine incarnation."""

    def __init__(self, *, registries: Registries, node_id: str, clock: Clock, joined: asyncio.Event) -> None:
        self._registries = registries
        self._node_id = node_id
        self._clock = clock
        self._joined = joined
        self._publishers: dict[str, Publisher] = {}
        self._closing: set[str] = set()
        self._ended = asyncio.Event()
        # Holds no more than there are engines.
        self._started: asyncio.Queue[tuple[str, Publisher]] = asyncio.Queue()

    @property
    def purging(self) -> bool:
        """Whether pointers of an engine that is gone are still being removed."""
        return bool(self._closing)

    def open(self, engine_id: str) -> None:
        """Starts publishing for an engine, unless that has been done."""
        if engine_id not in self._publishers:
            publisher = Publisher(
                registries=self._registries,
                node_id=self._node_id,
                engine_id=engine_id,
                clock=self._clock,
                joined=self._joined,
            )
            self._publishers[engine_id] = publisher
            self._started.put_nowait((engine_id, publisher))

    def publish(self, engine_id: str, block_set: BlockSet) -> None:
        """Wants a set's pointers written."""
        self.open(engine_id)
        self._publishers[engine_id].publish(block_set)

    def unpublish(self, engine_id: str, block_set: BlockSet) -> None:
        """Wants a set's pointers removed."""
        self.open(engine_id)
        self._publishers[engine_id].unpublish(block_set)

    def forget(self, engine_id: str) -> None:
        """Ends all pointers of an engine."""
        publisher = self._publishers.pop(engine_id, None)
        if publisher is not None:
            self._closing.add(engine_id)
            publisher.close()

    def lease_lost(self) -> None:
        """Ends the pointers until the node has joined again."""
        for publisher in self._publishers.values():
            publisher.wake()

    async def close(self, timeout_s: float) -> None:
        """Ends all pointers; what is not ended in time is left to their leases."""
        for engine_id in list(self._publishers):
            self.forget(engine_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._closing:
                    await self._ended.wait()
                    self._ended.clear()

    async def run(self, hear: Hear) -> None:
        """Runs all publishers until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                engine_id, publisher = await self._started.get()
                group.create_task(self._run_one(engine_id, publisher, hear))

    async def _run_one(self, engine_id: str, publisher: Publisher, hear: Hear) -> None:
        try:
            await publisher.run(hear)
        finally:
            self._closing.discard(engine_id)
            self._ended.set()
