"""Whether etcd answers, and who is told."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import BackhaulError
from backhaul_common.etcd import Get, Listing

_log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
PROBE_S = 2.0
"""A probe without an answer for so long counts as failed."""

Listener = Callable[[BackhaulError | None], Awaitable[None]]
"""Called on every change: with None when etcd answers, else with the reason why not."""


class Probed(Protocol):
    """What is asked."""

    async def range(self, get: Get, *, timeout_s: float) -> Listing:
        """Reads keys, linearizably."""
        ...


class Availability:
    """Asks etcd for nothing, again and again; a linearizable read fails without a quorum too."""

    def __init__(self, etcd: Probed, key: bytes, clock: Clock, listeners: Sequence[Listener]) -> None:
        self._etcd = etcd
        self._key = key
        self._clock = clock
        self._listeners = listeners
        self._available: bool | None = None

    @property
    def available(self) -> bool:
        """Whether etcd answered the last time."""
        return self._available is True

    async def run(self) -> None:
        """Probes for ever; ends when cancelled."""
        while True:
            await self._set(await self._probe())
            await self._clock.sleep(INTERVAL_S)

    async def _probe(self) -> BackhaulError | None:
        try:
            await self._etcd.range(Get(self._key, limit=1), timeout_s=PROBE_S)
        except BackhaulError as error:
            return error
        return None

    async def _set(self, problem: BackhaulError | None) -> None:
        available = problem is None
        if available == self._available:
            return
        self._available = available
        if problem is None:
            _log.info("etcd answers")
        else:
            _log.warning("etcd does not answer", reason=problem.reason, problem=problem.message)
        for listener in self._listeners:
            await listener(problem)
