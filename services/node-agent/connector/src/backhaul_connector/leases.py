"""Deadlines of retained blocks, from the workers that hold them to the scheduler that reports them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

_INTERVAL_S = 0.25


@dataclass
class LeaseSnapshot(KVConnectorWorkerMetadata):
    """Deadlines that changed on one worker, or on several, in the scheduler's clock."""

    deadlines: dict[str, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LeaseSnapshot":
        """Merges by minimum: blocks are safe until the first rank frees them."""
        assert isinstance(other, LeaseSnapshot)
        merged = dict(self.deadlines)
        for req_id, deadline in other.deadlines.items():
            merged[req_id] = min(deadline, merged.get(req_id, deadline))
        return LeaseSnapshot(merged)


class LeaseWatcher:
    """Watches one worker's lease map for deadlines that heartbeats moved."""

    def __init__(self) -> None:
        self._offset = float("-inf")
        self._known: dict[str, float] = {}
        self._due = 0.0

    def stepped(self, scheduler_clock: float, now: float) -> None:
        """Notes the scheduler's clock of a step that arrives ``now``.

        The scheduler may run in another process, with another epoch. The largest difference seen is kept: it makes
        deadlines early rather than late.
        """
        if scheduler_clock:
            self._offset = max(self._offset, now - scheduler_clock)

    def changed(self, leases: object, now: float | None = None) -> LeaseSnapshot | None:
        """Returns the deadlines that changed since the last call, a few times a second, else None.

        ``leases`` is the worker's private ``_reqs_to_send`` (``nixl/base_worker.py``: request id to deadline in the
        worker's clock). Anything but a mapping of floats gives None: then no renewal counts.
        """
        now = time.perf_counter() if now is None else now
        if now < self._due or not isinstance(leases, Mapping) or self._offset == float("-inf"):
            return None
        self._due = now + _INTERVAL_S
        current = {
            req_id: deadline
            for req_id, deadline in leases.items()
            if isinstance(req_id, str) and isinstance(deadline, float)
        }
        moved = {
            req_id: deadline - self._offset
            for req_id, deadline in current.items()
            if self._known.get(req_id, deadline) != deadline
        }
        self._known = current
        return LeaseSnapshot(moved) if moved else None
