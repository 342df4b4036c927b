"""The connector's state in a worker process."""

import time
from typing import Any

from backhaul_connector.clocks import RemoteClocks
from backhaul_connector.fence import EndFence
from backhaul_connector.leases import LeaseWatcher


class WorkerSide:
    """Follows reads with a deadline, and leases."""

    def __init__(self) -> None:
        self.clocks = RemoteClocks()
        self.fence = EndFence(self.clocks)
        self.leases = LeaseWatcher()

    def step(self, metadata: Any) -> None:
        """Takes what the scheduler sends with a step (``NixlConnectorMetadata``)."""
        self.leases.stepped(metadata.scheduler_clock, time.perf_counter(), metadata.reqs_to_send)
        self.fence.started(metadata.reqs_to_recv)
