"""Metrics for Prometheus: OpenTelemetry's SDK behind the instruments, and the HTTP endpoint where they are read."""

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.aiohttp import make_aiohttp_handler

from backhaul_common.addresses import split_address
from backhaul_common.errors import UnavailableError
from backhaul_common.grpc_server import warn_of_plaintext
from backhaul_common.tls import Identity, ListenerContext

PATH = "/metrics"

MAX_CONNECTIONS = 64
"""Connections at once; for a further one the oldest is closed, so that who opens many keeps no scraper out."""

_IDLE_S = 75.0
"""How long a scraper's connection may be idle: longer than between two scrapes, usually."""
_END_S = 0.1


@contextmanager
def configure_metrics(service_name: str, instance: str, *, wanted: bool) -> Iterator[CollectorRegistry | None]:
    """Has the instruments counted and yields what there is to read, or None where nobody wants it: nothing is counted.

    ``instance`` names the process in `target_info`. Make the instruments inside: before, they count nothing.
    """
    if not wanted:
        yield None
        return
    registry = CollectorRegistry()
    # CPU, memory and open files of the process, as Prometheus' own clients name them.
    ProcessCollector(registry=registry)
    provider = meter_provider(service_name, instance, registry)
    metrics.set_meter_provider(provider)
    try:
        yield registry
    finally:
        provider.shutdown()


def meter_provider(service_name: str, instance: str, registry: CollectorRegistry) -> MeterProvider:
    """Returns a provider whose instruments are read from ``registry``."""
    identity = {
        SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service_name),
        SERVICE_INSTANCE_ID: instance,
        SERVICE_VERSION: version("backhaul-common"),
    }
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    return MeterProvider(
        [reader],
        resource=Resource.create(identity),
        exemplar_filter=AlwaysOffExemplarFilter(),
        shutdown_on_exit=False,
    )


class MetricsEndpoint:
    """Serves what there is to read on an address of its own, and nothing else.

    Enter it inside the event loop whose parts are measured: they are read in its thread. Over ``tls`` whoever has a
    certificate of the services' CA may read, as with health checks.
    """

    def __init__(self, address: str, registry: CollectorRegistry, *, tls: Identity | None = None) -> None:
        self._address = address
        self._registry = registry
        self._tls = tls
        self._runner: web.ServerRunner | None = None
        self.port = 0
        """Port that it listens on; known once entered."""

    async def __aenter__(self) -> Self:
        """Binds and starts. Raises UnavailableError (ADDRESS_UNAVAILABLE) when the address cannot be bound."""
        server = _Server(_page(self._registry), access_log=None, keepalive_timeout=_IDLE_S)
        self._runner = web.ServerRunner(server, shutdown_timeout=_END_S)
        await self._runner.setup()
        host, port = split_address(self._address)
        if self._tls is None:
            warn_of_plaintext(self._address)
        context = ListenerContext(self._tls).front if self._tls else None
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=context).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UnavailableError("ADDRESS_UNAVAILABLE", f"cannot listen on {self._address}: {error}") from error
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()


class _Server(web.Server):
    """Serves the newest connections, so many at once."""

    def connection_made(self, handler: Any, transport: Any) -> None:
        super().connection_made(handler, transport)
        for older in self.connections[:-MAX_CONNECTIONS]:
            older.force_close()


def _page(registry: CollectorRegistry) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Returns what answers requests."""
    metrics_page: Any = make_aiohttp_handler(registry)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != PATH:
            return web.Response(status=404, text=f"there is nothing here but {PATH}")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="use GET", headers={"allow": "GET, HEAD"})
        page: web.StreamResponse = await metrics_page(request)
        return page

    return answer
