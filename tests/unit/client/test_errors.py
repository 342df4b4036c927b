"""What a router's status becomes, also when somebody on the way has garbled it."""

from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from backhaul_client import UnavailableError
from backhaul_client.errors import error_from

_WORDS = "upstream connect error"
_GARBLED = AnyMessage(type_url=f"type.googleapis.com/{ErrorInfo.DESCRIPTOR.full_name}", value=b"\xff\xff")


class _Failed(grpc.aio.AioRpcError):
    def __init__(self, details: bytes) -> None:
        trailing: Any = grpc.aio.Metadata(("grpc-status-details-bin", details))
        super().__init__(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details=_WORDS)


@pytest.mark.parametrize(
    "details", [b"\xff\xff", Status(code=14, message=_WORDS, details=[_GARBLED]).SerializeToString()]
)
def test_details_that_are_garbled_are_left_out(details: bytes) -> None:
    error = error_from(_Failed(details))
    assert (type(error), error.reason) == (UnavailableError, "UNAVAILABLE")
