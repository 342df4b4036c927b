"""What etcd says of itself, and who is told: a version that may lose data, a database that is full."""

from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import BackhaulError
from backhaul_common.etcd import MemberStatus

_log = structlog.get_logger(__name__)

INTERVAL_S = 2.0

_LOSSY_VERSIONS = frozenset({"3.5.0", "3.5.1", "3.5.2"})
"""etcd-io/etcd#13766: a member that is killed under load can lose writes that the others have."""

Listener = Callable[[bool], Awaitable[None]]
"""Called with whether etcd is full, whenever that changes."""


class Described(Protocol):
    """What is asked."""

    async def status(self) -> MemberStatus:
        """Asks a member for its version and the cluster's alarms."""
        ...


class Condition:
    """Asks etcd how it is, again and again. While etcd does not answer, nothing is known to have changed."""

    def __init__(self, etcd: Described, clock: Clock, on_full: Listener) -> None:
        self._etcd = etcd
        self._clock = clock
        self._on_full = on_full
        self.full = False
        """Whether it has raised the alarm NOSPACE."""
        self.corrupt = False
        """Whether it has raised the alarm CORRUPT."""
        self._warned_of = ""

    async def run(self) -> None:
        """Asks for ever; ends when cancelled."""
        while True:
            try:
                await self._take(await self._etcd.status())
            except BackhaulError as error:
                _log.debug("etcd does not tell its condition", reason=error.reason)
            await self._clock.sleep(INTERVAL_S)

    async def _take(self, status: MemberStatus) -> None:
        if status.version in _LOSSY_VERSIONS and status.version != self._warned_of:
            self._warned_of = status.version
            _log.warning("etcd version can lose data when it is killed under load", version=status.version)
        if status.corrupt and not self.corrupt:
            _log.error("etcd says that its members differ: replace the member that raised the alarm CORRUPT")
        self.corrupt = status.corrupt
        if status.full == self.full:
            return
        self.full = status.full
        if status.full:
            _log.error("etcd is full: nothing is published until it is compacted, defragmented, and its alarm disarmed")
        else:
            _log.info("etcd has space again")
        await self._on_full(status.full)
