"""A conversation: its session id, and what has been said."""

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Protocol, Self

from backhaul_client.answer import Answer, Started
from backhaul_client.errors import BackhaulError


class Turns(Protocol):
    """What a conversation needs of a client."""

    def chat(
        self, body: Mapping[str, Any], *, session_id: str = ..., timeout_s: float = ...
    ) -> AbstractAsyncContextManager[Answer]: ...

    async def end_conversation(self, session_id: str = ..., *, model: str = ...) -> object: ...


class Conversation:
    """One turn after the other. Leaving its context ends it: what engines retain for its next turn is released."""

    def __init__(
        self,
        client: Turns,
        model: str,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        session_id: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._client = client
        self._model = model
        self._options = dict(options or {})
        self.session_id = session_id or uuid.uuid4().hex
        """Names it at the router."""
        self.messages: list[Mapping[str, Any]] = list(messages)
        """All that has been said. A turn that fails leaves nothing here."""
        self.started: Started | None = None
        """How the last turn was served."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What ended it early is what counts.
        with suppress(BackhaulError) if exc else nullcontext():
            await self.end()

    async def say(self, content: str, *, timeout_s: float = 600.0) -> AsyncIterator[str]:
        """Yields the answer as it comes. Both go into `messages` when it is complete. Raises BackhaulError.

        Whoever does not read to the end closes it (`contextlib.aclosing`), which ends the turn.
        """
        asked = [*self.messages, {"role": "user", "content": content}]
        body = {**self._options, "model": self._model, "messages": asked, "stream": True}
        said: list[str] = []
        async with self._client.chat(body, session_id=self.session_id, timeout_s=timeout_s) as answer:
            self.started = answer.started
            async for text in answer.texts():
                said.append(text)
                yield text
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    async def ask(self, content: str, *, timeout_s: float = 600.0) -> str:
        """Returns the whole answer. Raises BackhaulError."""
        return "".join([text async for text in self.say(content, timeout_s=timeout_s)])

    async def end(self) -> None:
        """Has what is retained for the next turn released. Raises BackhaulError."""
        await self._client.end_conversation(self.session_id, model=self._model)
