"""Turns over gRPC."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import grpc
from google.protobuf import json_format

from backhaul.router.v1 import router_pb2 as pb
from backhaul.router.v1 import router_pb2_grpc
from backhaul_client.answer import Answer, object_in, started_from
from backhaul_client.channel import metadata_for, open_channel
from backhaul_client.conversation import Conversation
from backhaul_client.errors import EngineFailedError
from backhaul_client.retrying import Retries

if TYPE_CHECKING:
    Stub: TypeAlias = "router_pb2_grpc.InferenceServiceAsyncStub"

Body = Mapping[str, Any] | bytes
"""A request body of the OpenAI API, or its JSON."""

_TURN_S = 600.0
_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a conversation's block sets."""

    released_count: int
    """Sets whose release was sent to engines."""
    deferred_count: int
    """Sets that a turn is reading, or may be reading: released once that is over."""


class Client:
    """Talks to one router, or to several behind one address.

    Enter it inside the event loop that uses it. All calls raise BackhaulError. Cancelling a call, or leaving an answer
    early, ends what runs for it on the engines.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retries: Retries | None = None,
    ) -> None:
        """``address`` is host:port of the router's gRPC API; ``credentials`` make it TLS."""
        self._address = address
        self._key = key
        self._credentials = credentials
        self._retries = retries or Retries()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._address, self._credentials)
        self._stub: Stub = router_pb2_grpc.InferenceServiceStub(self._channel)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    @asynccontextmanager
    async def chat(
        self, body: Body, *, session_id: str = "", reuse: bool = True, timeout_s: float = _TURN_S
    ) -> AsyncIterator[Answer]:
        """Runs one chat turn; entered when something of the answer is there. The deadline bounds all of it."""
        request = pb.ChatCompletionsRequest(body=encoded(body), session_id=session_id)
        async with self._answer(self._stub.ChatCompletions, request, reuse=reuse, timeout_s=timeout_s) as answer:
            yield answer

    @asynccontextmanager
    async def complete(
        self, body: Body, *, session_id: str = "", reuse: bool = True, timeout_s: float = _TURN_S
    ) -> AsyncIterator[Answer]:
        """Runs one completion; entered when something of the answer is there. The deadline bounds all of it."""
        request = pb.CompletionsRequest(body=encoded(body), session_id=session_id)
        async with self._answer(self._stub.Completions, request, reuse=reuse, timeout_s=timeout_s) as answer:
            yield answer

    def conversation(
        self, model: str, *, messages: Sequence[Mapping[str, Any]] = (), session_id: str = "", **options: Any
    ) -> Conversation:
        """Returns a conversation with a session id of its own, unless one is given.

        ``messages`` is what was said before (a system prompt); ``options`` are fields of every turn's body.
        """
        return Conversation(self, model, messages=messages, session_id=session_id, options=options)

    async def end_conversation(
        self,
        session_id: str = "",
        *,
        body: Body = b"",
        model: str = "",
        cache_salt: str = "",
        timeout_s: float = _CALL_S,
    ) -> Ended:
        """Has what is retained for a conversation released. Without a session id the last turn's ``body`` names it."""
        request = pb.EndConversationRequest(
            session_id=session_id, body=encoded(body), model=model, cache_salt=cache_salt
        )
        answer = await self._repeatable(self._stub.EndConversation, request, timeout_s)
        return Ended(answer.released_count, answer.deferred_count)

    async def models(self, *, timeout_s: float = _CALL_S) -> list[dict[str, Any]]:
        """Returns the models that live nodes serve, as OpenAI's objects."""
        answer = await self._repeatable(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        entries: list[dict[str, Any]] = object_in(answer.body)["data"]
        return entries

    async def explain(self, body: Body, *, session_id: str = "", timeout_s: float = _CALL_S) -> dict[str, Any]:
        """Returns how a chat turn would be served now, as ExplainResponse has it. The router needs `--explain`."""
        request = pb.ExplainRequest(body=encoded(body), session_id=session_id, api=pb.API_CHAT_COMPLETIONS)
        answer = await self._repeatable(self._stub.Explain, request, timeout_s)
        return json_format.MessageToDict(answer, preserving_proto_field_name=True)

    @asynccontextmanager
    async def _answer(self, method: Any, request: Any, *, reuse: bool, timeout_s: float) -> AsyncIterator[Answer]:
        metadata = metadata_for(self._key, reuse=reuse)

        async def begun(left_s: float) -> tuple[Any, Any]:
            call = method(request, timeout=left_s, metadata=metadata)
            try:
                return call, await call.read()
            except BaseException:
                call.cancel()
                raise

        call, first = await self._retries.run(begun, timeout_s=timeout_s, idempotent=False)
        try:
            if first is grpc.aio.EOF or first.WhichOneof("step") != "started":
                raise EngineFailedError("PROTOCOL", "the router's answer does not say how the turn is served")
            yield Answer(started_from(first.started), call)
        finally:
            call.cancel()

    async def _repeatable(self, method: Callable[..., Awaitable[Any]], request: Any, timeout_s: float) -> Any:
        async def call(left_s: float) -> Any:
            return await method(request, timeout=left_s, metadata=metadata_for(self._key))

        return await self._retries.run(call, timeout_s=timeout_s, idempotent=True)


def encoded(body: Body) -> bytes:
    """Returns a body's JSON."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()
