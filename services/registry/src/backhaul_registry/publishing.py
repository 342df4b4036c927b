"""One publish stream: its pointers, their leases, and what keeps them alive.

A lease that lives says nothing about the pointers: etcd may have been restored from a snapshot that has the lease and
not what was written since, or somebody deleted keys. So each write leaves a mark and needs the one before, and each
renewal looks for it.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace

import structlog

from backhaul_common.clock import Clock, SystemClock
from backhaul_common.errors import UnavailableError
from backhaul_registry.core import rules
from backhaul_registry.core.ledger import Ledger
from backhaul_registry.core.model import Pointer, PointerId
from backhaul_registry.core.session import Increasing, check_owner
from backhaul_registry.etcd_store import Mark, PointerStore

_log = structlog.get_logger(__name__)

_RETRY_S = 0.5


class PublishStream:
    """The pointers that one stream has published.

    Abandoning it leaves the pointers to the TTL of their leases.
    """

    def __init__(
        self,
        store: PointerStore,
        node_id: str,
        engine_id: str,
        *,
        ttl_s: float,
        clock: Clock | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._store = store
        self._node_id = node_id
        self._engine_id = engine_id
        self._ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._ledger = ledger or Ledger()
        self._order = Increasing()
        self._mark = Mark(uuid.uuid4().hex, 0)
        # Guards the mark, so that it is not looked for while another one is being written.
        self._writing = asyncio.Lock()

    async def open(self) -> float:
        """Makes the first lease and returns its TTL in seconds."""
        lease = await self._store.grant(self._ttl_s)
        self._ledger.add_lease(lease.lease_id)
        self._mark = replace(self._mark, lease_id=lease.lease_id)
        return lease.ttl_s

    async def take(self, nonce: int, upserts: Sequence[Pointer], removals: Sequence[PointerId]) -> None:
        """Makes one batch durable.

        Raises InvalidArgumentError before anything is written, AbortedError (LEASE_LOST, HISTORY_LOST).
        """
        self._order = self._order.next(nonce)
        rules.check_batch(upserts, removals)
        check_owner(self._node_id, self._engine_id, tuple(upserts))
        for _ in range(self._ledger.missing_leases(upserts)):
            self._ledger.add_lease((await self._store.grant(self._ttl_s)).lease_id)
        writes = self._ledger.place(upserts, removals)
        if writes:
            async with self._writing:
                self._mark = await self._store.write(writes, self._mark)

    async def keep_leases(self) -> None:
        """Renews all leases every third of their TTL, for ever.

        Raises AbortedError: LEASE_LOST when a lease is gone, HISTORY_LOST when what was written under them is.
        """
        pause_s = self._ttl_s / 3
        while True:
            await self._clock.sleep(pause_s)
            try:
                for lease_id in self._ledger.leases:
                    await self._store.renew(lease_id)
                await self._check()
                pause_s = self._ttl_s / 3
            except UnavailableError as error:
                # A lease may outlive an outage (etcd extends it when a leader is elected): ask until etcd knows.
                _log.info("pointer leases not renewed", engine_id=self._engine_id, reason=error.reason)
                pause_s = _RETRY_S

    async def _check(self) -> None:
        async with self._writing:
            await self._store.check(self._mark)

    async def purge(self) -> None:
        """Removes all pointers and leases."""
        for lease_id in self._ledger.leases:
            await self._store.purge(lease_id, self._ledger.keys(lease_id))
        _log.info("pointers purged", engine_id=self._engine_id)
