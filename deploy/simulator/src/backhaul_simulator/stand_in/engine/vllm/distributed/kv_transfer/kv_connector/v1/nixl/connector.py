"""vLLM's own NixlConnector."""

from backhaul_simulator.stock_connector import NixlConnector

__all__ = ["NixlConnector"]
