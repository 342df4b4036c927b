"""The gRPC face: the same turns, the same bodies."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_router.admission import Admission
from backhaul_router.conversations import Conversations, Ending
from backhaul_router.core.body import Endpoint
from backhaul_router.explaining import explanation_to
from backhaul_router.grpc_requests import Context, GrpcRequests, as_statuses, endpoint_of, metadata_of, started_to
from backhaul_router.grpc_streams import GrpcStreams, chunks_of
from backhaul_router.models import Models
from backhaul_router.ports import TurnRequest
from backhaul_router.slow_readers import SlowReaders
from backhaul_router.turns import Turns

SERVICE_NAME = "backhaul.router.v1.InferenceService"

R = TypeVar("R")


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
        self._requests = GrpcRequests(turns, body_limit_bytes=body_limit_bytes)
        self._streams = GrpcStreams(turns, admission)
        self._slow_readers = SlowReaders(send_s)

    async def ChatCompletions(
        self, request: router_pb2.ChatCompletionsRequest, context: Context
    ) -> AsyncIterator[router_pb2.ChatCompletionsResponse]:
        """Runs one chat turn."""
        turn = self._requests.turn(Endpoint.CHAT, request.body, request.session_id, context)
        async with aclosing(self._steps(turn, context, router_pb2.ChatCompletionsResponse)) as steps:
            async for step in steps:
                yield step

    async def Completions(
        self, request: router_pb2.CompletionsRequest, context: Context
    ) -> AsyncIterator[router_pb2.CompletionsResponse]:
        """Runs one completion."""
        turn = self._requests.turn(Endpoint.COMPLETIONS, request.body, request.session_id, context)
        async with aclosing(self._steps(turn, context, router_pb2.CompletionsResponse)) as steps:
            async for step in steps:
                yield step

    async def EndConversation(
        self, request: router_pb2.EndConversationRequest, context: Context
    ) -> router_pb2.EndConversationResponse:
        """Releases what is retained for a conversation."""
        self._requests.check_size(request.body)
        ending = Ending(
            session_id=request.session_id,
            body=request.body,
            model=request.model,
            cache_salt=request.cache_salt,
            authorization=metadata_of(context).get("authorization"),
        )
        with as_statuses(), self._admission.ending(len(request.body)):
            ended = await self._conversations.end(ending)
        return router_pb2.EndConversationResponse(released_count=ended.released, deferred_count=ended.deferred)

    async def Explain(self, request: router_pb2.ExplainRequest, context: Context) -> router_pb2.ExplainResponse:
        """Says how a turn would be served."""
        turn = self._requests.turn(endpoint_of(request.api), request.body, request.session_id, context)
        with as_statuses(), self._admission.listing(len(request.body)):
            return explanation_to(await self._turns.explain(turn))

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        """Lists the models that live nodes serve."""
        self._requests.tenant(context)
        headers = self._turns.engine_headers(metadata_of(context).get("authorization"))
        with as_statuses(), self._admission.listing():
            return router_pb2.ListModelsResponse(body=await self._models.document(headers))

    async def _steps(self, turn: TurnRequest, context: Context, response: Callable[..., R]) -> AsyncGenerator[R]:
        async with self._streams.answered(turn, context) as answer:
            with self._slow_readers.watched(context) as reader:
                reader.began()
                yield response(started=started_to(answer.outcome, answer.headers.get("content-type", "")))
                reader.ended()
                async with aclosing(chunks_of(answer)) as chunks:
                    async for chunk in chunks:
                        reader.began()
                        yield response(chunk=chunk)
                        reader.ended()
