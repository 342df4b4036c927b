"""The gRPC face: the same turns, the same bodies."""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from opentelemetry import context as otel_context

from backhaul.router.v1 import router_pb2, router_pb2_grpc
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
from backhaul_router.admission import Admission
from backhaul_router.conversations import Conversations, Ending
from backhaul_router.core.body import Endpoint
from backhaul_router.core.engines import EngineError
from backhaul_router.core.errors import ApiError, bounded, engine_answer
from backhaul_router.core.turn import Outcome
from backhaul_router.explaining import explanation_to
from backhaul_router.models import Models
from backhaul_router.ports import Answer, TurnRequest
from backhaul_router.slow_readers import SlowReaders
from backhaul_router.turns import Turns

SERVICE_NAME = "backhaul.router.v1.InferenceService"

_CHUNK_BYTES = 1024 * 1024
"""Longest chunk: clients need no larger messages than gRPC's default of 4 MiB allows."""

_MESSAGE_BYTES = 1_500
"""Longest error message: a status carries it twice, escaped and packed, and 8 KiB of trailers always get through."""

_LONGEST_NUMBER = 20

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")

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


class InferenceService(router_pb2_grpc.InferenceServiceServicer):
    """Serves turns and the model list."""

    def __init__(
        self,
        *,
        turns: Turns,
        conversations: Conversations,
        models: Models,
        admission: Admission,
        body_limit_bytes: int,
        send_s: float,
    ) -> None:
        self._turns = turns
        self._conversations = conversations
        self._models = models
        self._admission = admission
        self._body_limit_bytes = body_limit_bytes
        self._slow_readers = SlowReaders(send_s)

    async def ChatCompletions(
        self, request: router_pb2.ChatCompletionsRequest, context: Context
    ) -> AsyncIterator[router_pb2.ChatCompletionsResponse]:
        """Runs one chat turn."""
        turn = self._request(Endpoint.CHAT, request.body, request.session_id, context)
        async with aclosing(self._steps(turn, context, router_pb2.ChatCompletionsResponse)) as steps:
            async for step in steps:
                yield step

    async def Completions(
        self, request: router_pb2.CompletionsRequest, context: Context
    ) -> AsyncIterator[router_pb2.CompletionsResponse]:
        """Runs one completion."""
        turn = self._request(Endpoint.COMPLETIONS, request.body, request.session_id, context)
        async with aclosing(self._steps(turn, context, router_pb2.CompletionsResponse)) as steps:
            async for step in steps:
                yield step

    async def EndConversation(
        self, request: router_pb2.EndConversationRequest, context: Context
    ) -> router_pb2.EndConversationResponse:
        """Releases what is retained for a conversation."""
        if len(request.body) > self._body_limit_bytes:
            raise self._too_large()
        ending = Ending(
            session_id=request.session_id,
            body=request.body,
            model=request.model,
            cache_salt=request.cache_salt,
            authorization=_metadata(context).get("authorization"),
        )
        try:
            with self._admission.ending(len(request.body)):
                ended = await self._conversations.end(ending)
        except ApiError as error:
            raise _as_backhaul(error) from error
        return router_pb2.EndConversationResponse(released_count=ended.released, deferred_count=ended.deferred)

    async def Explain(self, request: router_pb2.ExplainRequest, context: Context) -> router_pb2.ExplainResponse:
        """Says how a turn would be served."""
        endpoint = _ENDPOINTS.get(request.api)
        if endpoint is None:
            raise InvalidArgumentError("API", "api must name the API that the body is for")
        turn = self._request(endpoint, request.body, request.session_id, context)
        try:
            with self._admission.listing(len(request.body)):
                return explanation_to(await self._turns.explain(turn))
        except ApiError as error:
            raise _as_backhaul(error) from error

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        """Lists the models that live nodes serve."""
        authorization = _metadata(context).get("authorization")
        try:
            self._turns.authenticate(authorization)
            with self._admission.listing():
                document = await self._models.document(self._turns.engine_headers(authorization))
        except ApiError as error:
            raise _as_backhaul(error) from error
        return router_pb2.ListModelsResponse(body=document)

    def _request(self, endpoint: Endpoint, body: bytes, session_id: str, context: Context) -> TurnRequest:
        if len(body) > self._body_limit_bytes:
            raise self._too_large()
        if context.time_remaining() == 0:
            raise DeadlineExceededError("DEADLINE_PASSED", "the deadline had passed before the turn began")
        metadata = _metadata(context)
        authorization = metadata.get("authorization")
        try:
            tenant = self._turns.authenticate(authorization)
        except ApiError as error:
            raise _as_backhaul(error) from error
        return TurnRequest(
            endpoint=endpoint,
            body=body,
            tenant=tenant,
            session_id=session_id or metadata.get("x-session-id") or metadata.get("x-conversation-id"),
            authorization=authorization,
            reuse=metadata.get("x-backhaul-reuse", "").lower() != "off",
            # The server interceptor's span, which continues the caller's trace.
            parent=otel_context.get_current(),
        )

    def _too_large(self) -> ResourceExhaustedError:
        limit = str(self._body_limit_bytes)
        message = f"the body is larger than {limit} bytes, which is this router's limit"
        return ResourceExhaustedError("BODY_LIMIT", message, limit=limit)

    async def _steps(self, turn: TurnRequest, context: Context, response: Callable[..., R]) -> AsyncGenerator[R]:
        try:
            admitted = self._admission.turn(turn.tenant, left_s=_left_s(context), byte_count=len(turn.body))
            async with admitted, self._turns.run(turn) as answer:
                if answer.status >= 400:
                    raise engine_answer(answer.status, answer.body or b"", answer.headers)
                with self._slow_readers.watched(context):
                    yield response(started=_started(answer.outcome, answer.headers))
                async with aclosing(_chunks(answer)) as chunks:
                    async for chunk in chunks:
                        with self._slow_readers.watched(context):
                            yield response(chunk=chunk)
        except ApiError as error:
            raise _as_backhaul(error) from error
        except EngineError as error:
            raise InternalError("ENGINE_FAILED", "the decode engine stopped in the middle") from error


async def _chunks(answer: Answer) -> AsyncGenerator[bytes]:
    if answer.stream is None:
        for piece in _cut(answer.body or b""):
            yield piece
        return
    async with aclosing(answer.stream.chunks()) as chunks:
        async for chunk in chunks:
            for piece in _cut(chunk):
                yield piece


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))


def _started(outcome: Outcome, headers: dict[str, str]) -> router_pb2.Started:
    return router_pb2.Started(
        route=outcome.route.value,
        miss_reason=outcome.miss,
        prompt_token_count=outcome.prompt_token_count,
        local_token_count=outcome.local_token_count,
        read_token_count=outcome.read_token_count,
        content_type=headers.get("content-type", ""),
        source=outcome.source,
    )


def _as_backhaul(error: ApiError) -> BackhaulError:
    fallback = InvalidArgumentError if error.status < 500 else InternalError
    details = {"param": error.param} if error.param else {}
    if "retry-after" in error.headers:
        details["retry_after_s"] = bounded(error.headers["retry-after"], _LONGEST_NUMBER)
    message = error.message.encode()[:_MESSAGE_BYTES].decode(errors="ignore")
    return _ERRORS.get(error.status, fallback)(str(error.code).upper(), message, **details)


def _left_s(context: Context) -> float:
    left_s = context.time_remaining()
    return math.inf if left_s is None else float(left_s)


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {str(key): value for key, value in pairs if isinstance(value, str)}
