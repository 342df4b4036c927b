"""The node's lease: a `JoinNode` stream that reconnects for ever; every wait has a limit."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable

import grpc
import structlog

from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_common.clock import Clock
from backhaul_common.durations import duration, seconds
from backhaul_common.errors import (
    AbortedError,
    AlreadyExistsError,
    BackhaulError,
    InvalidArgumentError,
    UnavailableError,
)
from backhaul_node_agent import convert
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.registries import Registries, end_of, exchange, pauses_between_attempts

_log = structlog.get_logger(__name__)

_LEAVE_S = 1.0

JoinCall = grpc.aio.StreamStreamCall[registry_pb2.JoinNodeRequest, registry_pb2.JoinNodeResponse]


class NodeSession:
    """Keeps the node joined.

    The lease counts from the time of sending the last answered message; the core hears of each answer, and of the loss.

    A record that the registry refuses is replaced by one that says so, until it changes or the stream to the registry
    breaks: the node stays joined, with what it has granted, and takes no turns.
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
        self._refused_node: registry_pb2.Node | None = None
        self._refusal = ""
        self._changed = asyncio.Event()
        self._leaving = False
        self._lease_id = 0
        self._expires_at = 0.0
        self._holding = False
        self._last_failure = ""
        self.joined = asyncio.Event()
        """Set while the node is joined."""
        self.left = asyncio.Event()
        """Set when the node has left for good: asked to, and taken out of the directory or without a lease."""

    def update(self, node: registry_pb2.Node) -> None:
        """Gives the node's record as it is now; the first one lets the session begin."""
        if node != self._node:
            self._node = node
            self._changed.set()

    async def leave(self) -> None:
        """Removes the node, for at most a second; beyond that `run` goes on trying until its lease has ended."""
        self._leaving = True
        self._changed.set()
        if self._holding:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self.left.wait()

    async def run(self, hear: ev.Hear) -> None:
        """Keeps joining until cancelled, or until the node has left as `leave` asked for."""
        while self._node is None and not self._leaving:
            await self._changed.wait()
            self._changed.clear()
        pauses = pauses_between_attempts()
        while not self._gone_for_good():
            channel, before = self._registries.channel, self._expires_at
            try:
                await self._attend(channel, hear)
            except BackhaulError as error:
                self._note_failure(error, channel, hear)
            if self._expires_at != before:
                pauses = pauses_between_attempts()
            if not self._gone_for_good():
                await self._clock.sleep(next(pauses))

    def _gone_for_good(self) -> bool:
        if self._leaving and not self._holding:
            self.left.set()
        return self.left.is_set()

    @property
    def _record(self) -> registry_pb2.Node:
        """The record to send."""
        assert self._node is not None
        return convert.refused_node(self._node, self._refusal) if self._node == self._refused_node else self._node

    def _note_refusal(self, error: BackhaulError) -> None:
        if not isinstance(error, InvalidArgumentError):
            self._refused_node = None
        elif self._sent_node == self._node:
            _log.error("the registry refuses the node's record", reason=error.reason, error=error.message)
            self._refused_node, self._refusal = self._node, error.message
            self._last_failure = error.reason

    def _note_failure(self, error: BackhaulError, channel: grpc.aio.Channel, hear: ev.Hear) -> None:
        self._note_refusal(error)
        if error.reason != self._last_failure:
            _log.warning("node session interrupted", reason=error.reason, error=error.message)
        self._last_failure = error.reason
        taken, lost = isinstance(error, AlreadyExistsError), isinstance(error, AbortedError)
        if taken or lost or self._clock.monotonic() >= self._expires_at:
            self._lose(hear, taken=taken)
        if not taken and not lost:
            self._registries.give_up(channel)

    def _lose(self, hear: ev.Hear, *, taken: bool) -> None:
        self._lease_id = 0
        self.joined.clear()
        if self._holding:
            self._holding = False
            hear(ev.LeaseLost())
            if taken:
                self._on_taken()

    async def _attend(self, channel: grpc.aio.Channel, hear: ev.Hear) -> None:
        """Joins and stays joined on one stream. Raises BackhaulError when it ends."""
        stub = registry_pb2_grpc.NodeServiceStub(channel)
        call: JoinCall = stub.JoinNode()
        # A stream that ends between two messages is noticed at once.
        call.add_done_callback(lambda _: self._changed.set())
        try:
            for sequence in itertools.count(1):
                request = self._next_request(sequence)
                due = await self._exchange(call, request, hear)
                if self.left.is_set():
                    return
                await self._wait_until(due)
        finally:
            call.cancel()

    def _next_request(self, sequence: int) -> registry_pb2.JoinNodeRequest:
        record = self._record
        request = registry_pb2.JoinNodeRequest(sequence=sequence)
        self._changed.clear()
        if sequence == 1:
            self._sent_node = record
            request.join.CopyFrom(
                registry_pb2.JoinNodeRequest.Join(node=record, ttl=duration(self._ttl_s), lease_id=self._lease_id)
            )
        elif self._leaving:
            request.leave.SetInParent()
        elif record != self._sent_node:
            self._sent_node = record
            request.update.node.CopyFrom(record)
        else:
            request.keep_alive.SetInParent()
        return request

    async def _exchange(self, call: JoinCall, request: registry_pb2.JoinNodeRequest, hear: ev.Hear) -> float:
        """Sends one message and waits for its answer. Returns when the next one is due."""
        sent = self._clock.monotonic()
        answer = await _answer(call, request, self._ttl_s / 3)
        if answer.sequence != request.sequence:
            raise UnavailableError("REGISTRY_CONFUSED", "the registry answered another message")
        step = answer.WhichOneof("step")
        if step == "left":
            self.left.set()
            self._lose(hear, taken=False)
            return sent
        ttl_s = seconds(answer.ttl)
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
    async with exchange(call, timeout_s):
        await call.write(request)
        answer = await call.read()
        if isinstance(answer, registry_pb2.JoinNodeResponse):
            return answer
        raise await end_of(call)
