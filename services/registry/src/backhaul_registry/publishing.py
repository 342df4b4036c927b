"""One publish stream: its pointers, their leases, and what keeps them alive."""

from collections.abc import Sequence

import structlog

from backhaul_common.clock import Clock, SystemClock
from backhaul_common.errors import UnavailableError
from backhaul_registry.core import rules
from backhaul_registry.core.ledger import Ledger
from backhaul_registry.core.model import Pointer, PointerId
from backhaul_registry.core.session import Increasing, check_owner
from backhaul_registry.etcd_store import PointerStore

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

    async def open(self) -> float:
        """Makes the first lease and returns its TTL in seconds."""
        lease = await self._store.grant(self._ttl_s)
        self._ledger.add_lease(lease.lease_id)
        return lease.ttl_s

    async def take(self, nonce: int, upserts: Sequence[Pointer], removals: Sequence[PointerId]) -> None:
        """Makes one batch durable.

        Raises InvalidArgumentError before anything is written, AbortedError (LEASE_LOST).
        """
        self._order = self._order.next(nonce)
        rules.check_batch(upserts, removals)
        check_owner(self._node_id, self._engine_id, tuple(upserts))
        for _ in range(self._ledger.missing_leases(upserts)):
            self._ledger.add_lease((await self._store.grant(self._ttl_s)).lease_id)
        await self._store.write(self._ledger.place(upserts, removals))

    async def keep_leases(self) -> None:
        """Renews all leases every third of their TTL, for ever. Raises AbortedError (LEASE_LOST) when one is gone."""
        pause_s = self._ttl_s / 3
        while True:
            await self._clock.sleep(pause_s)
            try:
                for lease_id in self._ledger.leases:
                    await self._store.renew(lease_id)
                pause_s = self._ttl_s / 3
            except UnavailableError as error:
                # A lease may outlive an outage (etcd extends it when a leader is elected): ask until etcd knows.
                _log.info("pointer leases not renewed", engine_id=self._engine_id, reason=error.reason)
                pause_s = _RETRY_S

    async def purge(self) -> None:
        """Removes all pointers and leases."""
        for lease_id in self._ledger.leases:
            await self._store.purge(lease_id, self._ledger.keys(lease_id))
        _log.info("pointers purged", engine_id=self._engine_id)
