"""grpc.health.v1 for asyncio servers."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIVENESS = "liveness"
"""Health of this name says that the process answers, for those who restart one that does not."""

_SERVING = health_pb2.HealthCheckResponse.ServingStatus.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.ServingStatus.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Health of a fixed list of services, which are up or down together; one alone may be impaired besides.

    `LIVENESS` is SERVING whatever they are.

    grpcio-health-checking's asyncio servicer forgets the second watcher of a service when the first one leaves
    (grpc_health/v1/_async.py, ``Watch``); this one serves any number.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._services = frozenset({"", LIVENESS, *service_names})
        self._status = _NOT_SERVING
        self._impaired: set[str] = set()
        self._ended = False
        self._changed = asyncio.Condition()

    async def set_serving(self, serving: bool) -> None:
        """Changes the state of all services."""
        async with self._changed:
            self._status = _SERVING if serving else _NOT_SERVING
            self._changed.notify_all()

    async def set_impaired(self, service: str, impaired: bool) -> None:
        """Makes one service NOT_SERVING whatever the others are, or no longer."""
        async with self._changed:
            (self._impaired.add if impaired else self._impaired.discard)(service)
            self._changed.notify_all()

    async def end(self) -> None:
        """Sets NOT_SERVING and ends all watches."""
        async with self._changed:
            self._status = _NOT_SERVING
            self._ended = True
            self._changed.notify_all()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Answers with the state; NOT_FOUND for an unknown service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._state(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yields the state now and after each change; SERVICE_UNKNOWN for an unknown service."""
        sent: Any = None
        while not self._ended or sent != self._state(request.service):
            state = self._state(request.service)
            if state != sent:
                sent = state
                yield health_pb2.HealthCheckResponse(status=state)
                continue
            async with self._changed:
                if not self._ended and sent == self._state(request.service):
                    await self._changed.wait()

    def _state(self, service: str) -> Any:
        if service not in self._services:
            return _SERVICE_UNKNOWN
        if service == LIVENESS:
            return _SERVING
        return _NOT_SERVING if service in self._impaired else self._status
