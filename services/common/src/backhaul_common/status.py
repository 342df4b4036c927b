"""Errors as gRPC statuses: one table, both directions."""

import re
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from backhaul_common.durations import duration
from backhaul_common.errors import (
    AbortedError,
    AlreadyExistsError,
    BackhaulError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from backhaul_common.texts import clip

DOMAIN = "backhaul"
"""``ErrorInfo.domain`` of every error that Backhaul raises."""

RETRY_AFTER = "retry_after_s"
"""Metadata of errors that say when to ask again, in seconds."""

_WHOLE_SECONDS = re.compile(r"[0-9]{1,9}")

# gRPC takes 8 KiB of metadata for certain (grpc/impl/channel_arg_names.h, GRPC_ARG_MAX_METADATA_SIZE); of a larger
# status only RESOURCE_EXHAUSTED arrives. The message travels twice: percent-encoded, which makes three bytes of one
# that is not ASCII, and in the details, which are in base64.
_MAX_MESSAGE_BYTES = 1_024
_MAX_REASON_BYTES = 128
_MAX_METADATA_ITEMS = 4
_MAX_KEY_BYTES = 64
_MAX_VALUE_BYTES = 192

CODES: dict[type[BackhaulError], grpc.StatusCode] = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    AbortedError: grpc.StatusCode.ABORTED,
    ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    InternalError: grpc.StatusCode.INTERNAL,
}

_CLASSES: dict[grpc.StatusCode, type[BackhaulError]] = {
    **{code: cls for cls, code in CODES.items()},
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    # The peer, or somebody on the way, ended a call that this side still wanted.
    grpc.StatusCode.CANCELLED: UnavailableError,
}


def to_status(error: BackhaulError) -> grpc.Status:
    """Returns the status to abort a call with: code, message, and ErrorInfo with reason and metadata.

    With metadata that say when to ask again (`RETRY_AFTER`) RetryInfo says so, too, and HTTP's header for clients of
    gateways that make HTTP of gRPC. What is too long to arrive is cut, with an ellipsis.
    """
    code = next((CODES[cls] for cls in type(error).__mro__ if cls in CODES), grpc.StatusCode.INTERNAL)
    message = clip(error.message, _MAX_MESSAGE_BYTES)
    retry_s = _retry_s(error)
    details = [_packed(_info_of(error))]
    if retry_s is not None:
        details.append(_packed(RetryInfo(retry_delay=duration(retry_s))))
    status = rpc_status.to_status(Status(code=code.value[0], message=message, details=details))
    return status if retry_s is None else _with_header(status, "retry-after", str(retry_s))


def _with_header(status: Any, name: str, value: str) -> grpc.Status:
    # A named tuple, which grpc.Status does not say.
    changed: grpc.Status = status._replace(trailing_metadata=(*status.trailing_metadata, (name, value)))
    return changed


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


def _retry_s(error: BackhaulError) -> int | None:
    text = error.metadata.get(RETRY_AFTER, "")
    # An engine's own header may hold a date.
    return int(text) if _WHOLE_SECONDS.fullmatch(text) else None


def _info_of(error: BackhaulError) -> ErrorInfo:
    items = list(error.metadata.items())[:_MAX_METADATA_ITEMS]
    metadata = {clip(key, _MAX_KEY_BYTES): clip(value, _MAX_VALUE_BYTES) for key, value in items}
    return ErrorInfo(reason=clip(error.reason, _MAX_REASON_BYTES), domain=DOMAIN, metadata=metadata)


def to_error(error: grpc.RpcError) -> BackhaulError:
    """Returns the error that the peer raised, in a call of either kind.

    Without ErrorInfo of our domain (a proxy, gRPC itself, another server) the reason is the status code's name.
    """
    cls = _CLASSES.get(error.code(), InternalError)
    info = _error_info(error)
    if info is None:
        return cls(error.code().name, error.details() or error.code().name)
    return cls(info.reason, error.details() or info.reason, **dict(info.metadata))


def _error_info(error: grpc.RpcError) -> ErrorInfo | None:
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            info = ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info
    except (ValueError, DecodeError):
        # Whoever answered, it was not one of ours.
        pass
    return None
