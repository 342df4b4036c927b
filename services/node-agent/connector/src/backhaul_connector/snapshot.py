"""What the worker side sends to the scheduler side with a step's output."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from backhaul_connector.leases import earliest


@dataclass
class LeaseSnapshot(KVConnectorWorkerMetadata):
    """Deadlines that changed on one worker, or on several, in the scheduler's clock."""

    deadlines: dict[str, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LeaseSnapshot":
        """Merges the snapshots of two ranks."""
        assert isinstance(other, LeaseSnapshot)
        return LeaseSnapshot(earliest(self.deadlines, other.deadlines))
