"""What the worker side sends to the scheduler side with a step's output."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass
class LeaseSnapshot(KVConnectorWorkerMetadata):
    """Deadlines that changed, in the scheduler's clock, by rank and request id."""

    moved: dict[int, dict[str, float]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    """Leases of each rank whose number has changed."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LeaseSnapshot":
        """Puts the snapshots of two ranks beside each other."""
        assert isinstance(other, LeaseSnapshot)
        return LeaseSnapshot({**self.moved, **other.moved}, {**self.counts, **other.counts})
