"""The router's view of the registry: lookups, and a node table that outlives the registry's absences."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc
import structlog

from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_common.clock import Clock
from backhaul_common.errors import BackhaulError, DeadlineExceededError, ResourceExhaustedError, UnavailableError
from backhaul_common.grpc_client import Connect, open_channel, to_error
from backhaul_router.convert import node_from, pointer_from
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.nodes import Node, NodeTable

_log = structlog.get_logger(__name__)

SILENCE_S = 25.0
"""Without a message for this long a watch is dead: the registry promises one every 10 seconds."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class RegistryClient:
    """Finds pointers and follows the nodes, at whichever of several replicas answers.

    Enter it inside the event loop that uses it; it follows the nodes until it is left.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        table: NodeTable,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
        silence_s: float = SILENCE_S,
        connect: Connect = open_channel,
    ) -> None:
        self._addresses = tuple(addresses)
        self._table = table
        self._clock = clock
        self._on_change = on_change
        self._silence_s = silence_s
        self._connect = connect
        self._channels: list[grpc.aio.Channel] = []
        self._preferred = 0
        """Index of the replica that answered last."""
        self._revision = 0
        """Last revision seen on the node watch; 0 before the first snapshot."""
        self._digest = 0
        """Digest that came with it."""
        self._parts: list[registry_pb2.Node] = []
        """Nodes of a snapshot of which more is to come."""
        self._broken = False
        """Whether the last attempt to watch failed; logged when it changes."""
        self._unusable: frozenset[str] = frozenset()
        self._listed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Opens a channel to each replica; connects in the background."""
        self._channels = [self._connect(address) for address in self._addresses]
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        for channel in self._channels:
            await channel.close()

    @property
    def follows(self) -> bool:
        """Whether the nodes are as a registry has them now, as far as is known."""
        return self._listed.is_set() and not self._broken

    async def listed(self, *, within_s: float) -> bool:
        """Waits for the first list of nodes; tells whether it came within ``within_s`` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._listed.wait(), within_s)
        return self._listed.is_set()

    async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> list[Pointer]:
        """Returns the pointers under ``keys``, in their order.

        Asks one replica after the other, all within ``timeout_s``. Raises DeadlineExceededError or the last replica's
        error.
        """
        deadline = self._clock.monotonic() + timeout_s
        request = registry_pb2.FindBlockSetsRequest(scope=scope, keys=keys)
        failure: BackhaulError = UnavailableError("NO_REGISTRY", "no registry is configured")
        for _ in self._channels:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise DeadlineExceededError("LOOKUP_TIMEOUT", "the registry did not answer in time")
            asked = self._preferred
            stub = registry_pb2_grpc.IndexServiceStub(self._channels[asked])
            try:
                response = await stub.FindBlockSets(request, timeout=left)
            except grpc.aio.AioRpcError as error:
                failure = to_error(error)
                if self._preferred == asked:
                    self._preferred = (asked + 1) % len(self._channels)
                # Another replica may be there, or have room.
                if not isinstance(failure, UnavailableError | ResourceExhaustedError):
                    break
            else:
                return [pointer_from(pointer) for pointer in response.pointers]
        raise failure

    async def _watch(self) -> None:
        """Keeps the node table up to date until cancelled; after a break it resumes, at another replica if need be.

        While no replica answers the table stays as it is.
        """
        pause, index = _FIRST_PAUSE_S, 0
        while True:
            seen = self._revision
            try:
                await self._follow(self._channels[index])
            except (BackhaulError, TimeoutError) as error:
                if not self._broken:
                    _log.warning("node watch broken", registry=self._addresses[index], error=str(error) or "silence")
                self._broken = True
            except Exception as error:  # noqa: BLE001  # the task border: one bad message must not end the watch
                self._revision = 0
                _log.error("node watch failed unexpectedly", exc_info=error)
            if self._revision != seen:
                pause = _FIRST_PAUSE_S
            index = (index + 1) % len(self._channels)
            await self._clock.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        stub = registry_pb2_grpc.NodeServiceStub(channel)
        request = registry_pb2.WatchNodesRequest(start_revision=self._revision, start_digest=self._digest)
        self._parts.clear()
        call = stub.WatchNodes(request)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await call.read()
                if not isinstance(message, registry_pb2.WatchNodesResponse):
                    raise UnavailableError("WATCH_ENDED", "the registry ended the watch")
                self._apply(message)
                if self._broken:
                    self._broken = False
                    _log.info("node watch restored", node_count=len(self._table))
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error
        finally:
            call.cancel()

    def _apply(self, message: registry_pb2.WatchNodesResponse) -> None:
        match message.WhichOneof("what"):
            case "snapshot":
                self._parts.extend(message.snapshot.nodes)
                if not message.more:
                    self._table.replace(self._usable(self._parts))
                    self._parts.clear()
                    self._listed.set()
            case "change":
                nodes = list(message.change.upserts)
                usable = self._usable(nodes)
                kept = {node.node_id for node in usable}
                gone = [*message.change.removals, *(node.node_id for node in nodes if node.node_id not in kept)]
                self._table.change(usable, gone)
            case _:
                self._revision, self._digest = message.revision, message.digest
                return
        if not message.more:
            self._revision, self._digest = message.revision, message.digest
        self._on_change()

    def _usable(self, messages: Sequence[registry_pb2.Node]) -> list[Node]:
        nodes = [(message.node_id, node_from(message)) for message in messages]
        odd = frozenset(node_id for node_id, node in nodes if node is None)
        for node_id in odd - self._unusable:
            _log.warning("node record not usable", node_id=node_id)
        self._unusable |= odd
        return [node for _, node in nodes if node is not None]
