"""What the gRPC services have in common: how a call becomes a turn, and an error a status."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry import context as otel_context

from backhaul.router.v1 import router_pb2
from backhaul_common.errors import (
    BackhaulError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from backhaul_common.status import RETRY_AFTER
from backhaul_router.core.body import Endpoint
from backhaul_router.core.engines import EngineError
from backhaul_router.core.errors import ApiError, bounded
from backhaul_router.core.turn import Outcome
from backhaul_router.ports import TurnRequest
from backhaul_router.turns import Turns

Context = grpc.aio.ServicerContext[Any, Any]

_MESSAGE_BYTES = 1_500
"""Longest error message: a status carries it twice, escaped and packed, and 8 KiB of trailers always get through."""

_LONGEST_NUMBER = 20

_ENDPOINTS = {
    router_pb2.API_CHAT_COMPLETIONS: Endpoint.CHAT,
    router_pb2.API_COMPLETIONS: Endpoint.COMPLETIONS,
}

_ERRORS: dict[int, type[BackhaulError]] = {
    401: UnauthenticatedError,
    403: UnauthenticatedError,
    404: NotFoundError,
    412: FailedPreconditionError,
    413: ResourceExhaustedError,
    429: ResourceExhaustedError,
    503: UnavailableError,
    504: DeadlineExceededError,
}


class GrpcRequests:
    """Makes turns of calls."""

    def __init__(self, turns: Turns, *, body_limit_bytes: int) -> None:
        self._turns = turns
        self._body_limit_bytes = body_limit_bytes

    def turn(self, endpoint: Endpoint, body: bytes, session_id: str, context: Context) -> TurnRequest:
        """Returns the turn that a call asks for. Raises BackhaulError."""
        self.check_size(body)
        if context.time_remaining() == 0:
            raise DeadlineExceededError("DEADLINE_PASSED", "the deadline had passed before the turn began")
        metadata = metadata_of(context)
        return TurnRequest(
            endpoint=endpoint,
            body=body,
            tenant=self.tenant(context),
            session_id=session_id or metadata.get("x-session-id") or metadata.get("x-conversation-id"),
            authorization=metadata.get("authorization"),
            reuse=metadata.get("x-backhaul-reuse", "").lower() != "off",
            # The server interceptor's span, which continues the caller's trace.
            parent=otel_context.get_current(),
        )

    def tenant(self, context: Context) -> str:
        """Returns the caller's tenant. Raises UnauthenticatedError."""
        with as_statuses():
            return self._turns.authenticate(metadata_of(context).get("authorization"))

    def check_size(self, body: bytes) -> None:
        """Raises ResourceExhaustedError (BODY_LIMIT)."""
        check_size(body, self._body_limit_bytes)


def check_size(body: bytes, limit_bytes: int) -> None:
    """Raises ResourceExhaustedError (BODY_LIMIT)."""
    if len(body) > limit_bytes:
        message = f"the body is larger than {limit_bytes} bytes, which is this router's limit"
        raise ResourceExhaustedError("BODY_LIMIT", message, limit=str(limit_bytes))


def endpoint_of(api: "router_pb2.Api.ValueType") -> Endpoint:
    """Returns the endpoint of an API. Raises InvalidArgumentError (API)."""
    endpoint = _ENDPOINTS.get(api)
    if endpoint is None:
        raise InvalidArgumentError("API", "api must name the API that the body is for")
    return endpoint


def started_to(outcome: Outcome, content_type: str = "") -> router_pb2.Started:
    """Returns how a turn is served."""
    return router_pb2.Started(
        route=outcome.route.value,
        miss_reason=outcome.miss,
        prompt_token_count=outcome.prompt_token_count,
        local_token_count=outcome.local_token_count,
        read_token_count=outcome.read_token_count,
        content_type=content_type,
        source=outcome.source,
    )


@contextmanager
def as_statuses() -> Iterator[None]:
    """Inside, errors for clients become those that have a status."""
    try:
        yield
    except ApiError as error:
        raise as_backhaul(error) from error
    except EngineError as error:
        raise InternalError("ENGINE_FAILED", "the decode engine stopped in the middle") from error


def as_backhaul(error: ApiError) -> BackhaulError:
    """Returns an error of the HTTP API as one that has a status."""
    fallback = InvalidArgumentError if error.status < 500 else InternalError
    details = {"param": error.param} if error.param else {}
    if "retry-after" in error.headers:
        details[RETRY_AFTER] = bounded(error.headers["retry-after"], _LONGEST_NUMBER)
    message = error.message.encode()[:_MESSAGE_BYTES].decode(errors="ignore")
    return _ERRORS.get(error.status, fallback)(str(error.code).upper(), message, **details)


def left_s(context: Context) -> float:
    """Returns how long the client waits, seconds."""
    left = context.time_remaining()
    return math.inf if left is None else float(left)


def metadata_of(context: Context) -> dict[str, str]:
    """Returns the metadata of a call that are texts."""
    pairs = context.invocation_metadata() or ()
    return {str(key): value for key, value in pairs if isinstance(value, str)}
