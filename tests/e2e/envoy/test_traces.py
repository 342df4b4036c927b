"""One trace per turn through a real Envoy, be it Envoy that begins it or its client."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.e2e.envoy.test_picker import front
from tests.fakes.eventually import eventually
from tests.fakes.otlp_collector import CollectedSpan, OtlpCollector
from tests.integration.test_router_traces import PARENT, TRACE_ID, named, span_id, tree, turn_in

_MANAGER = "          stat_prefix: openai\n"
_CLUSTERS = "  clusters:\n"
_AT_ONCE = """
layered_runtime:
  layers:
  - {name: spans, static_layer: {tracing.opentelemetry.min_flush_spans: 1}}
"""


def traced_to(port: int) -> Callable[[str], str]:
    """Has Envoy make spans of its own, and send them to a collector."""
    tracing = f"""{_MANAGER}          tracing:
            provider:
              name: envoy.tracers.opentelemetry
              typed_config:
                "@type": type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig
                grpc_service: {{envoy_grpc: {{cluster_name: collector}}, timeout: 1s}}
                service_name: envoy
"""
    cluster = f"""{_CLUSTERS}  - name: collector
    type: STATIC
    connect_timeout: 1s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment:
      cluster_name: collector
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}
"""

    def change(config: str) -> str:
        assert config.count(_MANAGER) == config.count(_CLUSTERS) == 1
        return config.replace(_MANAGER, tracing).replace(_CLUSTERS, cluster) + _AT_ONCE

    return change


async def test_the_clients_trace_goes_on_through_the_picker_to_both_engines(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with front(tmp_path) as found:
        got = await found.chat("hi", stream=True, headers={"traceparent": PARENT, "tracestate": "vendor=x"})
        (prefill,), (decode,) = found.stack.prefill.legs, found.stack.decode.legs

    turn = turn_in(spans)
    assert got.status == 200
    assert turn.parent is not None
    assert f"00-{turn.parent.trace_id:032x}-{turn.parent.span_id:016x}-01" == PARENT
    for leg, name in ((prefill, "prefill"), (decode, "decode")):
        (span,) = named(spans, name)
        assert leg.headers["traceparent"] == f"00-{TRACE_ID}-{span_id(span)}-01"
        assert leg.headers["tracestate"] == "vendor=x"


async def test_a_trace_that_envoy_begins_is_the_turns_and_the_engines(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    with OtlpCollector() as collector:
        async with front(tmp_path, traced_to(collector.port)) as found:
            got = await found.chat("hi", stream=True)
            (prefill,), (decode,) = found.stack.prefill.legs, found.stack.decode.legs
            await eventually(lambda: bool(named(spans, "turn")))
            turn = turn_in(spans)
            assert turn.context is not None
            assert turn.parent is not None
            trace_id, parent_id = f"{turn.context.trace_id:032x}", f"{turn.parent.span_id:016x}"

            def complete(found: list[CollectedSpan]) -> bool:
                return parent_id in {span.span_id for span in found}

            envoys = await asyncio.to_thread(collector.trace, trace_id, complete)
    assert got.status == 200
    assert {*tree(spans, turn)} == {"prefill", "decode"}
    assert parent_id in {span.span_id for span in envoys}
    [ingress] = [span for span in envoys if span.name == "ingress"]
    # Envoy tells the engine of its own span in place of the picker's.
    engines = [leg.headers["traceparent"].split("-")[1:3] for leg in (prefill, decode)]
    assert engines == [[trace_id, span_id(named(spans, "prefill")[0])], [trace_id, ingress.span_id]]
