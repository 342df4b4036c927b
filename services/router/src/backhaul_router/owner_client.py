"""Claims at the owners of block sets, their return, and releases of what nobody will read."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import grpc
import structlog

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_common.clock import Clock
from backhaul_common.errors import (
    AbortedError,
    BackhaulError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from backhaul_common.grpc_client import Connect, open_channel, to_error
from backhaul_router.convert import held_set_from
from backhaul_router.core.claims import Claim, Grant, Harvest, HeldSet, KeptBlocks, Released

_log = structlog.get_logger(__name__)

MAX_TELLINGS = 1_000
"""Returns and releases under way; beyond that one is dropped: its claim lapses, its hand-off's lease ends."""

_TELL_S = 1.0
_PAUSES_S = (0.1, 0.5, 2.0)
_EXIT_S = 1.0

_CERTAIN = (NotFoundError, FailedPreconditionError, InvalidArgumentError, AbortedError)
"""Refusals: the owner has granted nothing, and will not do what it was told."""


class OwnerClient:
    """Talks to agents, over one channel each.

    Enter it inside the event loop that uses it. Leaving it waits a second for what agents are still to be told.
    """

    def __init__(self, *, clock: Clock, connect: Connect = open_channel) -> None:
        self._clock = clock
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks = asyncio.TaskGroup()
        self._tellings: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._tellings:
            await asyncio.wait(self._tellings, timeout=_EXIT_S)
        for task in self._tellings:
            task.cancel()
        await self._tasks.__aexit__(None, None, None)
        for channel in self._channels.values():
            await channel.close()

    async def claim(self, claim: Claim, *, timeout_s: float) -> Grant:
        """Claims a block set. Sent once; raises BackhaulError for every other outcome than a grant.

        When the outcome is unknown (no answer in time, connection lost, caller cancelled) the claim is returned.
        """
        request = agent_pb2.ClaimBlockSetRequest(
            request_id=claim.request_id,
            set_id=claim.set_id,
            engine_id=claim.engine_id,
            scope=claim.scope,
            weights_digest=claim.weights_digest,
        )
        try:
            with _errors():
                response = await self._stub(claim.address).ClaimBlockSet(request, timeout=timeout_s)
        except (BackhaulError, asyncio.CancelledError) as error:
            if not isinstance(error, _CERTAIN):
                self.give_back(claim)
            raise
        return Grant(claim, response.kv_transfer_params_json, response.token_count)

    async def harvest(self, harvest: Harvest, *, timeout_s: float) -> Grant:
        """Asks for a fresh handle. Sent once; raises BackhaulError for every other outcome.

        When the outcome is unknown nothing is to be done: the owner releases a handle that it could not deliver.
        """
        request = agent_pb2.HarvestBlockSetRequest(
            set_id=harvest.set_id,
            engine_id=harvest.engine_id,
            scope=harvest.scope,
            weights_digest=harvest.weights_digest,
            model=harvest.model,
            cache_salt=harvest.cache_salt,
            token_ids=harvest.token_ids,
        )
        with _errors():
            response = await self._stub(harvest.address).HarvestBlockSet(request, timeout=timeout_s)
        kept = KeptBlocks(harvest.address, harvest.engine_id, response.hand_off_id)
        return Grant(kept, response.kv_transfer_params_json, response.token_count)

    def give_back(self, source: Claim | KeptBlocks) -> None:
        """Gives back in the background what nothing reads; what does not get through ends at the owner's deadline."""
        if isinstance(source, KeptBlocks):
            self.release(source)
            return
        request = agent_pb2.ReturnBlockSetRequest(request_id=source.request_id)
        self._tell("claim return", lambda: self._stub(source.address).ReturnBlockSet(request, timeout=_TELL_S))

    def release(self, kept: KeptBlocks) -> None:
        """Has a hand-off freed in the background; what does not get through is freed when its lease ends."""
        request = agent_pb2.ReleaseHandOffRequest(engine_id=kept.engine_id, hand_off_id=kept.hand_off_id)
        self._tell("hand-off release", lambda: self._stub(kept.address).ReleaseHandOff(request, timeout=_TELL_S))

    async def release_sets(
        self, address: str, set_ids: Sequence[str], *, timeout_s: float, scope: str = "", keys: Sequence[str] = ()
    ) -> Released:
        """Has an agent release block sets of its engines; ids that it does not know count as neither.

        With ``keys`` also those under one of them in ``scope`` to which no pointer leads yet.

        Raises BackhaulError. Sent once: releasing is idempotent, and callers may ask again.
        """
        request = agent_pb2.ReleaseBlockSetsRequest(set_ids=set_ids, keys=keys, scope=scope)
        with _errors():
            response = await self._stub(address).ReleaseBlockSets(request, timeout=timeout_s)
        return Released(len(response.released), len(response.deferred))

    async def list_sets(self, address: str, set_ids: Collection[str], *, timeout_s: float) -> list[HeldSet]:
        """Returns those of the sets that an agent holds. Raises BackhaulError."""
        request = agent_pb2.ListBlockSetsRequest(set_ids=set_ids)
        with _errors():
            response = await self._stub(address).ListBlockSets(request, timeout=timeout_s)
        # An agent that is too old for `set_ids` lists others.
        return [held_set_from(held) for held in response.block_sets if held.set_id in set_ids]

    async def forget(self, addresses: Collection[str]) -> None:
        """Closes the channels to agents that are gone."""
        for address in [known for known in self._channels if known in addresses]:
            await self._channels.pop(address).close(_EXIT_S)

    def known(self) -> frozenset[str]:
        """Returns the addresses with an open channel."""
        return frozenset(self._channels)

    def _tell(self, what: str, call: Callable[[], Awaitable[object]]) -> None:
        if len(self._tellings) >= MAX_TELLINGS:
            _log.warning("an agent was not told", what=what, reason="too many under way")
            return
        task = self._tasks.create_task(self._repeat(what, call))
        self._tellings.add(task)
        task.add_done_callback(self._tellings.discard)

    async def _repeat(self, what: str, call: Callable[[], Awaitable[object]]) -> None:
        for pause in (*_PAUSES_S, None):
            try:
                await call()
            except grpc.aio.AioRpcError as error:
                failure: BackhaulError = to_error(error)
            except Exception as error:  # noqa: BLE001  # the task border: claims and hand-offs end by themselves
                _log.error("an agent could not be told, unexpectedly", what=what, exc_info=error)
                return
            else:
                return
            if pause is None or isinstance(failure, _CERTAIN):
                _log.info("an agent was not told", what=what, reason=failure.reason)
                return
            await self._clock.sleep(pause)

    def _stub(self, address: str) -> "agent_pb2_grpc.BlockSetServiceAsyncStub":
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._connect(address)
        return agent_pb2_grpc.BlockSetServiceStub(channel)


@contextmanager
def _errors() -> Iterator[None]:
    """Raises BackhaulError for a call that fails, and for one whose channel was closed under it."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            # The node has left.
            raise UnavailableError("OWNER_GONE", "the owner has left") from None
        raise
