"""Carries a drain out: ends granting, waits until the node may leave, takes it out of the directory."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from backhaul_common.clock import Clock
from backhaul_node_agent.core.draining import Draining, DrainStatus, Load, Phase

_log = structlog.get_logger(__name__)

_POLL_S = 0.05
_SAY_EVERY_S = 2.0
"""Between two records that only say how far the drain is: each is a write to etcd, and a message to every router."""
_GRACE_S = 1.0


class Sets(Protocol):
    """What the node holds."""

    def drain(self) -> int: ...

    def awaited_count(self) -> int: ...


class Pointers(Protocol):
    """Pointers in the registry."""

    async def close(self, timeout_s: float) -> None: ...


class Membership(Protocol):
    """The node's place in the directory."""

    left: asyncio.Event

    async def leave(self) -> None: ...


class Drain:
    """The node's end of service, whoever asked for it."""

    def __init__(
        self, *, sets: Sets, pointers: Pointers, membership: Membership, clock: Clock, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when what the directory should say has changed."""
        self._sets = sets
        self._pointers = pointers
        self._membership = membership
        self._clock = clock
        self._on_change = on_change
        self._draining = Draining()
        self._load = Load()
        self._asked = asyncio.Event()
        self.reason = ""
        """How far it is, as the directory shows it; empty when the node is not draining."""
        self.over = asyncio.Event()
        """Set when nothing is left to do but to wait for the lease's end where no registry answers."""

    @property
    def retiring(self) -> bool:
        """Whether the engines are not to be used any more once the node has left."""
        return self._draining.retiring

    def on_load(self, load: Load) -> None:
        """Takes in what the engines have to do."""
        self._load = load

    def ask(self, within_s: float, *, retiring: bool) -> DrainStatus:
        """Drains the node, or brings the end of its drain forward. Returns how far it is."""
        now = self._clock.monotonic()
        if self._draining.phase is Phase.SERVING:
            _log.info("draining", within_s=within_s, retiring=retiring)
        self._draining.ask(now, within_s, retiring=retiring)
        set_count = self._sets.drain()
        self._say()
        self._asked.set()
        return DrainStatus(
            phase=self._draining.phase,
            remaining_s=self._draining.remaining_s(now),
            request_count=self._load.request_count or 0,
            set_count=set_count,
        )

    async def run(self) -> None:
        """Takes the node out of the directory when it is time; ends when it has left."""
        await self._asked.wait()
        said_at = self._clock.monotonic()
        while not self._draining.due(self._load, self._sets.awaited_count(), now := self._clock.monotonic()):
            if now - said_at >= _SAY_EVERY_S:
                said_at = now
                self._say()
            await self._clock.sleep(_POLL_S)
        _log.info("leaving", requests=self._load.request_count, sets=self._sets.awaited_count())
        await self._pointers.close(_GRACE_S)
        await self._membership.leave()
        self.over.set()
        await self._membership.left.wait()
        self._draining.leave()
        self._say()
        _log.info("left")

    def _say(self) -> None:
        self.reason = self._draining.reason(self._load, self._sets.awaited_count(), self._clock.monotonic())
        self._on_change()
