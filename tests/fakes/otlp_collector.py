"""A collector of traces: the OTLP service over gRPC, which keeps what it gets."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span as it arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    """Trace and span ids of the spans that it is linked to."""
    failed: bool
    """Whether its status says so."""


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a loopback port."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self.raw = b""
        """All that arrived."""
        self._arrived = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4))
        self.port = 0

    def __enter__(self) -> Self:
        register: Callable[..., None] = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        register(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        with self._arrived:
            self.raw += request.SerializeToString()
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes).get("service.name", "")
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    self._spans.append(
                        CollectedSpan(
                            service,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            _attributes(span.attributes),
                            tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                            span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                        )
                    )
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(
        self, trace_id: str, complete: Callable[[list[CollectedSpan]], bool], within_s: float = 15
    ) -> list[CollectedSpan]:
        """Returns the spans of a trace once ``complete`` says that all are there, or as they are after ``within_s``."""

        def found() -> list[CollectedSpan]:
            return [span for span in self._spans if span.trace_id == trace_id]

        with self._arrived:
            self._arrived.wait_for(lambda: complete(found()), within_s)
            return found()

    def turn(self, trace_id: str) -> CollectedSpan:
        """Returns the span of the turn in a trace, once it has arrived. Raises ValueError without one."""

        def turns(spans: list[CollectedSpan]) -> list[CollectedSpan]:
            return [span for span in spans if span.name == "turn"]

        [turn] = turns(self.trace(trace_id, lambda spans: bool(turns(spans))))
        return turn


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
