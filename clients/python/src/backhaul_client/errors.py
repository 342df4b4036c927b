"""What calls raise.

BackhaulError
├── InvalidRequestError     the request is wrong, or the engine refused it
├── UnauthenticatedError    the key is missing or wrong
├── NotFoundError           no such model, or no such turn
├── RefusedByStateError     not in this state; repeating does not help
├── LimitReachedError       a limit of the router, the tenant or the engines
├── UnavailableError        not now, or no connection
├── DeadlineExceededError   no answer in time
└── EngineFailedError       an engine failed, maybe in the middle of an answer; or a fault of the router
"""

from collections.abc import Mapping

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

_DOMAIN = "backhaul"

_NOTHING_BEGUN = frozenset(
    {
        "TOO_MANY_TURNS",
        "TOO_MANY_BYTES",
        "TOO_MANY_LISTS",
        "TOO_MANY_ENDINGS",
        "TOO_MANY_CALLS",
        "TENANT_LIMIT",
        "DISPLACED",
        "QUEUE_TIMEOUT",
    }
)
"""Reasons of refusals before anything ran."""


class BackhaulError(Exception):
    """Base of all that calls raise on purpose."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(reason, message)
        self.reason = reason
        """Why, for programs: UPPER_SNAKE. The status code's name where Backhaul did not say (a proxy, gRPC itself)."""
        self.message = message
        """Why, for people."""
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        """When to ask again, seconds from now; None where that is not known."""

    def __str__(self) -> str:
        return f"{self.message} ({self.reason})"

    @property
    def nothing_begun(self) -> bool:
        """Whether the router refused before it began anything: even a turn may be repeated."""
        return self.reason in _NOTHING_BEGUN


class InvalidRequestError(BackhaulError):
    """The request is wrong, or the engine refused it."""


class UnauthenticatedError(BackhaulError):
    """The key is missing or wrong."""


class NotFoundError(BackhaulError):
    """No such model, or no such turn."""


class RefusedByStateError(BackhaulError):
    """Not in this state; repeating does not help."""


class LimitReachedError(BackhaulError):
    """A limit of the router, the tenant or the engines."""


class UnavailableError(BackhaulError):
    """Not now, or no connection."""


class DeadlineExceededError(BackhaulError):
    """No answer in time."""


class EngineFailedError(BackhaulError):
    """An engine failed, maybe in the middle of an answer; or a fault of the router."""


_CLASSES: dict[grpc.StatusCode, type[BackhaulError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: UnauthenticatedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: RefusedByStateError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitReachedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
}


def error_from(error: grpc.aio.AioRpcError) -> BackhaulError:
    """Returns what the router said, or whoever answered in its place."""
    cls = _CLASSES.get(error.code(), EngineFailedError)
    message = error.details() or error.code().name
    status = _status_of(error)
    info, retry = ErrorInfo(), RetryInfo()
    if not _unpacked(status, info) or info.domain != _DOMAIN:
        return cls(error.code().name, message)
    retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9 if _unpacked(status, retry) else None
    return cls(info.reason, message, metadata=info.metadata, retry_after_s=retry_after_s)


def _status_of(error: grpc.aio.AioRpcError) -> Status:
    try:
        status: Status | None = rpc_status.from_call(error)
    except (ValueError, DecodeError):
        status = None
    return status or Status()


def _unpacked(status: Status, detail: Message) -> bool:
    try:
        return any(packed.Unpack(detail) for packed in status.details)
    except DecodeError:
        return False
