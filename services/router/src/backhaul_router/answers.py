"""From the decode engine's answer to the client's."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from backhaul_router.core.body import TurnBody
from backhaul_router.core.errors import ApiError
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.legs import without_params
from backhaul_router.core.turn import Outcome
from backhaul_router.core.usage import PromptUsage, UsageLines, with_prompt
from backhaul_router.ports import Answer, Stream


async def whole_of(stream: Stream) -> bytes | None:
    """Returns a whole answer, None for a stream of events. Raises EngineError when the engine stops before the end."""
    if stream.status == 200 and stream.headers.get("content-type", "").startswith("text/event-stream"):
        return None
    return await stream.read()


def answer_to(
    request: TurnBody, outcome: Outcome, stream: Stream, body: bytes | None, prompt: PromptUsage | None
) -> Answer:
    """Returns a stream as it is, everything else whole and without handles.

    ``prompt`` is what the prefill engine counted, when the decode engine cannot know. In a stream it is put in place
    only if the request asks for token counts. Raises ApiError (502) when a whole answer cannot be read.
    """
    status = stream.status
    if status >= 400:
        outcome.result = "refused" if status < 500 else "failed"
    headers = {**_passed_on(stream.headers), **outcome.headers}
    if body is None:
        counted = prompt is not None and (request.fields.get("stream_options") or {}).get("include_usage")
        return Answer(status, headers, outcome, None, Counted(stream, prompt) if counted and prompt else stream)
    try:
        body = without_params(body)
    except ValueError as error:
        raise ApiError(502, "the decode engine's answer is not valid") from error
    return Answer(status, headers, outcome, with_prompt(body, prompt) if prompt else body, None)


class Counted:
    """A stream whose token counts speak of the prompt as the prefill engine does."""

    def __init__(self, stream: Stream, prompt: PromptUsage) -> None:
        self._stream = stream
        self._lines = UsageLines(prompt)
        self.status = stream.status
        self.headers = stream.headers

    @property
    def complete(self) -> bool:
        """Whether the whole body has been yielded."""
        return self._stream.complete

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the body as it comes. Raises EngineError."""
        async with aclosing(self._stream.chunks()) as chunks:
            async for chunk in chunks:
                passed = self._lines.feed(chunk)
                if passed:
                    yield passed
        rest = self._lines.rest()
        if rest:
            yield rest

    async def read(self) -> bytes:
        """Returns the body. Raises EngineError."""
        return b"".join([chunk async for chunk in self.chunks()])


class Labelled:
    """Remembers a turn's key while its answer goes out, and for a moment after; forgets it when it breaks."""

    def __init__(self, fresh: FreshKeys, scope: str, key: str, outcome: Outcome, stream: Stream) -> None:
        self._fresh = fresh
        self._scope = scope
        self._key = key
        self._outcome = outcome
        self._stream = stream

    def __enter__(self) -> None:
        if self._key:
            self._fresh.note(self._scope, self._key)

    def __exit__(self, exc_type: type[BaseException] | None, exc: object, traceback: object) -> None:
        if exc_type is None and not self._stream.complete:
            self._outcome.result = "broken"
        if self._key:
            renew = self._fresh.note if self._stream.complete else self._fresh.forget
            renew(self._scope, self._key)


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of an engine's answer that mean something to the client."""
    lower = {name.lower(): value for name, value in headers.items()}
    return {
        name: value
        for name, value in lower.items()
        if name in ("content-type", "retry-after") or name.startswith("x-ratelimit-")
    }
