"""The gRPC face by which operators find what is held for a conversation."""

from backhaul.router.v1 import conversation_pb2, conversation_pb2_grpc
from backhaul_common.errors import FailedPreconditionError
from backhaul_router.admission import Admission
from backhaul_router.conversations import Conversations, Ending
from backhaul_router.core.candidates import Pointer
from backhaul_router.grpc_requests import Context, as_statuses, check_size, metadata_of

SERVICE_NAME = "backhaul.router.v1.ConversationService"


class ConversationService(conversation_pb2_grpc.ConversationServiceServicer):
    """Finds conversations, where the router may name nodes."""

    def __init__(
        self, conversations: Conversations, admission: Admission, *, body_limit_bytes: int, explain: bool
    ) -> None:
        self._conversations = conversations
        self._admission = admission
        self._body_limit_bytes = body_limit_bytes
        self._explain = explain

    async def FindConversation(
        self, request: conversation_pb2.FindConversationRequest, context: Context
    ) -> conversation_pb2.FindConversationResponse:
        """Says where a conversation's block sets are."""
        if not self._explain:
            raise FailedPreconditionError("EXPLAIN_OFF", "this router names no nodes: it runs without --explain")
        check_size(request.body, self._body_limit_bytes)
        wanted = Ending(
            session_id=request.session_id,
            body=request.body,
            model=request.model,
            cache_salt=request.cache_salt,
            authorization=metadata_of(context).get("authorization"),
        )
        with as_statuses(), self._admission.listing(len(request.body)):
            found = await self._conversations.find(wanted)
        return conversation_pb2.FindConversationResponse(held=[_held(model, pointer) for model, pointer in found])


def _held(model: str, pointer: Pointer) -> conversation_pb2.HeldSet:
    return conversation_pb2.HeldSet(
        model=model,
        node_id=pointer.node_id,
        engine_id=pointer.engine_id,
        set_id=pointer.set_id,
        token_count=pointer.token_count,
        cached=pointer.cached,
    )
