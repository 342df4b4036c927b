"""The interface of connectors."""

from backhaul_simulator.connector_base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

__all__ = ["KVConnectorMetadata", "KVConnectorRole", "KVConnectorTransferResults", "KVConnectorWorkerMetadata"]
