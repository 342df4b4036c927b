"""The HTTP API over gRPC, for gateways that make gRPC of HTTP: bodies pass as they are."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

from google.api.httpbody_pb2 import HttpBody

from backhaul.router.v1 import http_pb2 as pb
from backhaul.router.v1 import http_pb2_grpc
from backhaul_router.admission import Admission
from backhaul_router.answers import with_error_event
from backhaul_router.conversations import Conversations, Ending, deleted_document
from backhaul_router.core.body import Endpoint
from backhaul_router.core.errors import ApiError
from backhaul_router.grpc_requests import Context, GrpcRequests, as_backhaul, as_statuses, metadata_of
from backhaul_router.grpc_streams import GrpcStreams, cut
from backhaul_router.models import Models
from backhaul_router.ports import Answer, TurnRequest
from backhaul_router.slow_readers import SlowReaders
from backhaul_router.turns import Turns

SERVICE_NAME = "backhaul.router.v1.HttpService"

_JSON = "application/json"

R = TypeVar("R")


class HttpApiService(http_pb2_grpc.HttpServiceServicer):
    """Serves the HTTP API's four paths."""

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
        self._requests = GrpcRequests(turns, body_limit_bytes=body_limit_bytes)
        self._streams = GrpcStreams(turns, admission)
        self._slow_readers = SlowReaders(send_s)

    async def CreateChatCompletion(
        self, request: pb.CreateChatCompletionRequest, context: Context
    ) -> AsyncIterator[pb.CreateChatCompletionResponse]:
        """Runs one chat turn."""
        turn = self._turn(Endpoint.CHAT, request.body, context)
        async with aclosing(self._pieces(turn, context, pb.CreateChatCompletionResponse)) as pieces:
            async for piece in pieces:
                yield piece

    async def CreateCompletion(
        self, request: pb.CreateCompletionRequest, context: Context
    ) -> AsyncIterator[pb.CreateCompletionResponse]:
        """Runs one completion."""
        turn = self._turn(Endpoint.COMPLETIONS, request.body, context)
        async with aclosing(self._pieces(turn, context, pb.CreateCompletionResponse)) as pieces:
            async for piece in pieces:
                yield piece

    async def GetModels(self, request: pb.GetModelsRequest, context: Context) -> pb.GetModelsResponse:
        """Lists the models that live nodes serve."""
        self._requests.tenant(context)
        headers = self._turns.engine_headers(metadata_of(context).get("authorization"))
        with as_statuses(), self._admission.listing():
            document = await self._models.document(headers)
        return pb.GetModelsResponse(body=HttpBody(content_type=_JSON, data=document))

    async def DeleteConversation(
        self, request: pb.DeleteConversationRequest, context: Context
    ) -> pb.DeleteConversationResponse:
        """Releases what is retained for a conversation."""
        ending = Ending(
            session_id=request.id,
            model=request.model,
            cache_salt=request.cache_salt,
            authorization=metadata_of(context).get("authorization"),
        )
        with as_statuses(), self._admission.ending():
            ended = await self._conversations.end(ending)
        document = deleted_document(request.id, ended)
        return pb.DeleteConversationResponse(body=HttpBody(content_type=_JSON, data=document))

    def _turn(self, endpoint: Endpoint, body: HttpBody, context: Context) -> TurnRequest:
        if body.content_type.partition(";")[0].strip().lower() != _JSON:
            raise as_backhaul(ApiError(415, "the content type must be application/json"))
        return self._requests.turn(endpoint, body.data, "", context)

    async def _pieces(self, turn: TurnRequest, context: Context, response: Callable[..., R]) -> AsyncGenerator[R]:
        """Yields an answer's head, a piece without bytes, and then the rest of it."""
        async with self._streams.answered(turn, context) as answer:
            kind = answer.headers.get("content-type", _JSON)
            with self._slow_readers.watched(context) as reader:
                reader.began()
                yield response(body=HttpBody(content_type=kind))
                reader.ended()
                async with aclosing(_bytes_of(answer, turn.endpoint)) as pieces:
                    async for piece in pieces:
                        reader.began()
                        yield response(body=HttpBody(content_type=kind, data=piece))
                        reader.ended()


async def _bytes_of(answer: Answer, endpoint: Endpoint) -> AsyncGenerator[bytes]:
    """Yields an answer's bytes. A stream that breaks ends with an error event: HTTP/1.1 has no place for a status."""
    if answer.stream is None:
        for piece in cut(answer.body or b""):
            yield piece
        return
    async with aclosing(with_error_event(answer.stream, endpoint.value)) as chunks:
        async for chunk in chunks:
            for piece in cut(chunk):
                yield piece
