"""What a trace shows of the registry."""

import asyncio

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.etcd import EtcdClient, EtcdOptions, Put
from backhaul_registry.core.model import PointerId
from backhaul_registry.keys import Keys
from tests.fakes import samples
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.log_lines import log_lines
from tests.fakes.registry_process import Registry, running_registry
from tests.fakes.streams import Joining, Publishing
from tests.integration.test_tracing_document import undocumented

pytestmark = pytest.mark.etcd


def tree(spans: tuple[ReadableSpan, ...]) -> dict[str, str]:
    """Returns the parent's name of each span, by name."""
    names = {span.context.span_id: span.name for span in spans if span.context}
    return {span.name: names.get(span.parent.span_id, "?") if span.parent else "" for span in spans}


async def test_a_search_is_a_server_span_with_an_etcd_transaction_inside(
    registry: Registry, spans: InMemorySpanExporter
) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer()])
        spans.clear()
        with trace.get_tracer("test").start_as_current_span("turn"):
            await registry.index.FindBlockSets(pb.FindBlockSetsRequest(scope="scope", keys=["k1", "k2"]), timeout=5)
    finished = spans.get_finished_spans()
    method = "/backhaul.registry.v1.IndexService/FindBlockSets"
    assert [span.name for span in finished] == ["etcd.txn", method, method, "turn"]
    etcd, server, client, turn = finished
    assert [span.kind for span in finished[:3]] == [SpanKind.CLIENT, SpanKind.SERVER, SpanKind.CLIENT]
    for child, parent in ((etcd, server), (server, client), (client, turn)):
        assert child.parent is not None
        assert parent.context is not None
        assert child.parent.span_id == parent.context.span_id
    assert dict(etcd.attributes or {})["backhaul.etcd.key_count"] == 2
    assert dict(server.attributes or {})["backhaul.pointer.count"] == 1
    assert undocumented(finished) == set()
    assert not any("k1" in str(value) for span in finished for value in (span.attributes or {}).values())


async def test_what_is_logged_of_a_call_names_the_callers_trace(
    shared_etcd: EtcdProcess, cluster: str, registry: Registry, spans: InMemorySpanExporter
) -> None:
    async with EtcdClient(EtcdOptions(endpoints=(shared_etcd.endpoint,))) as etcd:
        await etcd.txn([], [Put(Keys(cluster).pointer(PointerId("scope", "k1", "set-1")), b"garbage")])
    with log_lines("registry") as lines:
        with trace.get_tracer("test").start_as_current_span("look") as look:
            await registry.index.FindBlockSets(pb.FindBlockSetsRequest(scope="scope", keys=["k1"]), timeout=5)
        named = trace.format_trace_id(look.get_span_context().trace_id)
        assert lines.traces("unreadable record ignored") == {"unreadable record ignored": named}


async def test_a_join_is_a_span_of_its_own_and_keep_alives_are_none(
    registry: Registry, spans: InMemorySpanExporter
) -> None:
    async with Joining(registry.nodes) as stream:
        await stream.join(samples.node())
        await stream.send(keep_alive=pb.JoinNodeRequest.KeepAlive())
        await stream.send(leave=pb.JoinNodeRequest.Leave())
    assert tree(spans.get_finished_spans()) == {
        "etcd.lease_grant": "registry.join",
        "etcd.txn": "registry.join",
        "registry.join": "",
    }


async def test_a_listing_shows_its_etcd_call(registry: Registry, spans: InMemorySpanExporter) -> None:
    await registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=5)
    assert tree(spans.get_finished_spans())["etcd.list"] == "/backhaul.registry.v1.NodeService/ListNodes"


async def test_a_failed_search_is_marked_on_all_its_spans(
    own_etcd: EtcdProcess, cluster: str, spans: InMemorySpanExporter
) -> None:
    async with running_registry(own_etcd.endpoint, cluster) as registry:
        own_etcd.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await registry.index.FindBlockSets(pb.FindBlockSetsRequest(scope="s", keys=["k"]), timeout=5)
    finished = [span for span in spans.get_finished_spans() if "Find" in span.name or span.name == "etcd.txn"]
    assert len(finished) == 3
    assert {span.status.status_code for span in finished} == {StatusCode.ERROR}


async def test_a_quiet_registry_makes_no_spans(registry: Registry, spans: InMemorySpanExporter) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer()])
        await asyncio.sleep(1.2)
    assert spans.get_finished_spans() == ()
