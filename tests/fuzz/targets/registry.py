"""The registry's services, and what it finds in etcd."""

import asyncio
from typing import Any
from unittest.mock import patch

from google.protobuf.duration_pb2 import Duration

from backhaul.registry.v1 import diagnosis_pb2
from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.errors import UnavailableError
from backhaul_common.etcd import KeyValue, MemberStatus
from backhaul_registry import convert, index_service
from backhaul_registry.core import rules
from backhaul_registry.diagnosis_service import DiagnosisService
from backhaul_registry.etcd_store import NodeStore, PointerStore
from backhaul_registry.hub import Hub, Subscription
from backhaul_registry.index_service import IndexService
from backhaul_registry.keys import Keys
from backhaul_registry.node_service import NodeService
from backhaul_registry.records import Records
from tests.fakes import samples
from tests.fakes.etcd import FakeEtcd
from tests.fuzz.inputs import made_of, messages_of
from tests.fuzz.rpc import target_of
from tests.fuzz.target import Target

_KEYS = Keys("c")
_SERVICES = pb.DESCRIPTOR.services_by_name


class _NoWatch(Hub[Any]):
    """Nobody can watch: what a watch says comes from the registry itself."""

    def __init__(self) -> None:
        etcd = FakeEtcd()
        super().__init__(etcd, b"/", lambda kv: None, etcd.clock, always=False)

    async def subscribe(self, start_revision: int, start_digest: int) -> Subscription[Any]:
        raise UnavailableError("NO_WATCH", "nobody can watch")


def _index() -> IndexService:
    store = PointerStore(FakeEtcd(), _KEYS, Records(_KEYS))
    return IndexService(store, _NoWatch(), asyncio.Event(), ttl_s=30, etcd_answers=lambda: True)


def _nodes() -> NodeService:
    return NodeService(NodeStore(FakeEtcd(), _KEYS, Records(_KEYS)), _NoWatch(), asyncio.Event())


class _Member(FakeEtcd):
    """Says how it is."""

    endpoint = "10.0.0.1:2379"

    async def status(self, *, timeout_s: float | None = None) -> MemberStatus:
        return MemberStatus("3.5.17", full=False, corrupt=False, size_bytes=4096, revision=7)


def _diagnosis() -> DiagnosisService:
    etcd = _Member()
    return DiagnosisService(etcd, _KEYS.nodes, etcd.clock)


def _node_value(message: bytes) -> bytes:
    return b"\x01" + message


def _pointer_value(message: bytes) -> bytes:
    return b"\x02" + message


def _facts() -> pb.BlockSetPointer:
    return convert.facts_to_proto(convert.pointer_from_proto(samples.pointer()))


def _read_node(data: bytes) -> bool:
    node = Records(_KEYS).read_node(KeyValue(_KEYS.node("d1"), data, 1, 1, 0))
    if node is None:
        return False
    rules.check_node(convert.node_from_proto(convert.node_to_proto(node)))
    return True


def _read_pointer(data: bytes) -> bool:
    records = Records(_KEYS)
    sample = convert.pointer_from_proto(samples.pointer())
    pointer = records.read_pointer(KeyValue(_KEYS.pointer(sample.id), data, 1, 1, 0))
    if pointer is None:
        return False
    assert pointer.id == sample.id
    convert.pointer_to_proto(pointer)
    return True


_PUBLISH, _JOIN = pb.PublishBlockSetsRequest, pb.JoinNodeRequest

TARGETS = (
    target_of(
        "registry index",
        _SERVICES["IndexService"],
        _index,
        {
            "FindBlockSets": [pb.FindBlockSetsRequest(scope="scope", keys=["k1", "k2"])],
            "PublishBlockSets": [
                _PUBLISH(open=_PUBLISH.Open(node_id="d1", engine_id="e1")),
                _PUBLISH(open=_PUBLISH.Open(node_id="d1", engine_id="e1")),
                _PUBLISH(batch=_PUBLISH.Batch(nonce=1, upserts=[samples.pointer()], removals=[samples.pointer("b")])),
            ],
            "RemoveBlockSets": [pb.RemoveBlockSetsRequest(pointers=[samples.pointer()])],
            "ListBlockSets": [pb.ListBlockSetsRequest(scope="scope", page_size=5, page_token="azE=")],
            "WatchBlockSets": [pb.WatchBlockSetsRequest(scope="scope", start_revision=4, start_digest=5)],
        },
        # A stream that has ended waits so long to see whether its client has left.
        within=lambda: patch.object(index_service, "_CANCELLATION_S", 0.0),
    ),
    target_of(
        "registry nodes",
        _SERVICES["NodeService"],
        _nodes,
        {
            "JoinNode": [
                _JOIN(sequence=1, join=_JOIN.Join(node=samples.node(), ttl=Duration(seconds=10))),
                _JOIN(sequence=1, join=_JOIN.Join(node=samples.node(), lease_id=7)),
                _JOIN(sequence=2, update=_JOIN.Update(node=samples.node())),
                _JOIN(sequence=2, keep_alive=_JOIN.KeepAlive()),
                _JOIN(sequence=3, leave=_JOIN.Leave()),
            ],
            "ListNodes": [pb.ListNodesRequest()],
            "WatchNodes": [pb.WatchNodesRequest(start_revision=4, start_digest=5)],
        },
    ),
    target_of(
        "registry diagnosis",
        diagnosis_pb2.DESCRIPTOR.services_by_name["DiagnosisService"],
        _diagnosis,
        {"Diagnose": [diagnosis_pb2.DiagnoseRequest()]},
    ),
    Target(
        "nodes in etcd",
        ("backhaul_registry.records:Records.read_node",),
        made_of(messages_of(samples.node()), _node_value),
        _read_node,
    ),
    Target(
        "pointers in etcd",
        ("backhaul_registry.records:Records.read_pointer",),
        made_of(messages_of(_facts()), _pointer_value),
        _read_pointer,
    ),
)
