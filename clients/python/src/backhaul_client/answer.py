"""The answer to a turn, piece by piece."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from backhaul.router.v1 import router_pb2
from backhaul_client.errors import EngineFailedError, error_from

_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Started:
    """How a turn is served."""

    route: str
    """`cold`, `warm` or `append`."""
    miss_reason: str
    """Why it is cold; empty when it is not."""
    source: str
    """What a warm turn's blocks were: `claimed` or `cached`; empty when it is not warm."""
    prompt_token_count: int
    """0 when unknown, as are those below."""
    local_token_count: int
    """Tokens that the prefill engine had in its own cache."""
    read_token_count: int
    """Tokens that the prefill engine read from the decode engine."""
    content_type: str
    """Of the whole answer; empty for a planned turn."""

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.content_type.startswith("text/event-stream")


def started_from(message: router_pb2.Started) -> Started:
    """Returns what the router said."""
    return Started(
        route=message.route,
        miss_reason=message.miss_reason,
        source=message.source,
        prompt_token_count=message.prompt_token_count,
        local_token_count=message.local_token_count,
        read_token_count=message.read_token_count,
        content_type=message.content_type,
    )


class Answer:
    """An answer that has begun. Read it once, by one of its methods."""

    def __init__(self, started: Started, call: Any) -> None:
        """``call`` gives the further messages of the gRPC stream."""
        self.started = started
        self._call = call

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the bytes as the HTTP API would send them. Raises BackhaulError, also in the middle."""
        try:
            # Whoever has read a first message by itself may not iterate (grpc/aio/_call.py).
            while (message := await self._call.read()) is not grpc.aio.EOF:
                yield message.chunk
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure) from failure

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the JSON objects of a stream of events, to its end.

        Raises BackhaulError; EngineFailedError (UNREADABLE_ANSWER) for an event that is none.
        """
        parser = EventParser()
        async for chunk in self.chunks():
            for data in parser.feed(chunk):
                if data == _DONE:
                    return
                yield object_in(data)

    async def texts(self) -> AsyncIterator[str]:
        """Yields what a streamed answer says: the text of its first choice. Raises BackhaulError."""
        async for event in self.events():
            if text := text_of(event):
                yield text

    async def document(self) -> dict[str, Any]:
        """Returns the JSON object of an answer that is not streamed.

        Raises BackhaulError; EngineFailedError (UNREADABLE_ANSWER) for an answer that is none.
        """
        return object_in(b"".join([chunk async for chunk in self.chunks()]))


class EventParser:
    """Finds the data of server-sent events in chunks of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yields the data of each line that is complete. Engines write one line for each event."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")


def object_in(data: str | bytes) -> dict[str, Any]:
    """Returns the JSON object that an engine wrote. Raises EngineFailedError (UNREADABLE_ANSWER)."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise EngineFailedError("UNREADABLE_ANSWER", "the engine's answer holds something else than a JSON object")
    return document


def text_of(event: dict[str, Any]) -> str:
    """Returns what an event adds to the text of the first choice; empty for other events."""
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            delta = choice.get("delta")
            text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
            return text if isinstance(text, str) else ""
    return ""
