"""OpenTelemetry SDK set-up for traces; `exposition` has that for metrics. No other module knows the SDK."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_log = structlog.get_logger(__name__)

_SWITCHES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_EXIT_S = 1.5
"""With what a service needs to end by itself, two seconds."""


@contextmanager
def configure_telemetry(service_name: str) -> Iterator[None]:
    """Exports spans over OTLP/gRPC, in batches off the request path, until left.

    Does nothing unless one of OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_TRACES_EXPORTER
    is set; `OTEL_TRACES_EXPORTER=none` and `OTEL_SDK_DISABLED=true` switch it off. Sampling, headers and limits come
    from the standard variables too. Leaving flushes for a second and a half at most, whatever the collector does.
    """
    if not _wanted():
        yield
        return
    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service_name)})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        _shut_down(provider)


def _wanted() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(map(os.environ.get, _SWITCHES)):
        return False
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "grpc"):
        _log.warning("OTLP protocol not supported, spans go out over gRPC", protocol=protocol, supported="grpc")
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if exporter not in ("otlp", "none"):
        _log.warning("trace exporter not supported", exporter=exporter, supported="otlp, none")
    return exporter == "otlp"


def _shut_down(provider: TracerProvider) -> None:
    # The exporter retries inside its own shutdown; a daemon thread cannot hold the process.
    thread = threading.Thread(target=provider.shutdown, daemon=True)
    thread.start()
    thread.join(_EXIT_S)
    if thread.is_alive():
        _log.warning("spans not flushed in time", limit_s=_EXIT_S)
