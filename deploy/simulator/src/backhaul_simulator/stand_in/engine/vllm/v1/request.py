"""Requests."""

from backhaul_simulator.engine_request import EngineRequest as Request
from backhaul_simulator.engine_request import RequestStatus

__all__ = ["Request", "RequestStatus"]
