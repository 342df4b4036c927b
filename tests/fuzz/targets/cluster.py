"""What registries, agents and proxies between them tell a router."""

from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.status import to_error, to_status
from backhaul_router import convert
from backhaul_router.core.legs import is_object
from backhaul_router.core.nodes import NodeTable
from tests.fakes import samples
from tests.fuzz.inputs import json_of, messages_of
from tests.fuzz.target import Target


def _node(data: bytes) -> bool:
    try:
        message = registry_pb2.Node.FromString(data)
    except DecodeError:
        return False
    node = convert.node_from(message)
    if node is None:
        return False
    table = NodeTable()
    table.replace([node])
    table.problem()
    return bool(node.endpoint)


def _pointer(data: bytes) -> bool:
    try:
        convert.pointer_from(registry_pb2.BlockSetPointer.FromString(data))
    except DecodeError:
        return False
    return True


def _load(data: bytes) -> bool:
    try:
        message = agent_pb2.WatchLoadResponse.FromString(data)
    except DecodeError:
        return False
    return bool(convert.load_reports_from(message))


class _Failed(grpc.RpcError):
    """A call that failed with these trailers."""

    def __init__(self, details: bytes) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        return "no"

    def trailing_metadata(self) -> Any:
        return (("grpc-status-details-bin", self._details),)


def _status(data: bytes) -> bool:
    return to_error(_Failed(data)).reason == "WHY"


_STATUS: Any = to_status(InvalidArgumentError("WHY", "no", field="x"))
_DETAILS = next(value for key, value in _STATUS.trailing_metadata if key == "grpc-status-details-bin")

TARGETS = (
    Target("nodes for a router", ("backhaul_router.convert:node_from",), messages_of(samples.node()), _node),
    Target(
        "pointers for a router",
        ("backhaul_router.convert:pointer_from",),
        messages_of(samples.pointer(traceparent="t")),
        _pointer,
    ),
    Target(
        "load for a router",
        ("backhaul_router.convert:load_reports_from",),
        messages_of(agent_pb2.WatchLoadResponse(engines=[agent_pb2.EngineLoad(engine_id="e", running_count=1)])),
        _load,
    ),
    Target("handles for a router", ("backhaul_router.core.legs:is_object",), json_of({"a": [1]}), is_object),
    Target(
        "errors of calls",
        ("backhaul_common.status:_error_info",),
        messages_of(Status.FromString(_DETAILS)),
        _status,
    ),
)
