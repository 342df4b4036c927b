"""From the decode engine's answer to the client's."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from backhaul_router.core import responses
from backhaul_router.core.body import Endpoint, TurnBody
from backhaul_router.core.clean_lines import CleanLines, longest_line, without_params
from backhaul_router.core.engines import EngineError, Failure
from backhaul_router.core.errors import ApiError, engine_answer
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.sse import is_events
from backhaul_router.core.turn import Outcome
from backhaul_router.core.usage import PromptUsage, UsageLines, with_prompt
from backhaul_router.ports import Answer, Stream

_COUNTING = (Endpoint.RESPONSES, Endpoint.MESSAGES)
"""Streams that say what was used without being asked."""


async def whole_of(stream: Stream) -> bytes | None:
    """Returns a whole answer, None for a stream of events. Raises EngineError when the engine stops before the end."""
    if stream.status == 200 and is_events(stream.headers):
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
    headers = {**passed_on(stream.headers), **outcome.headers}
    if body is None:
        counted = request.endpoint in _COUNTING or (request.fields.get("stream_options") or {}).get("include_usage")
        return Answer(status, headers, outcome, None, Checked(stream, prompt if counted else None, request.endpoint))
    return Answer(status, headers, outcome, turn_answer(request, status, body, prompt), None)


def turn_answer(request: TurnBody, status: int, body: bytes, prompt: PromptUsage | None) -> bytes:
    """Returns a turn's whole answer as `whole_answer` does; says why an engine has no earlier response."""
    if status == 404 and request.previous_response_id and engine_answer(status, body, {}).param == "response_id":
        return responses.not_kept(at_engine=True).body
    return whole_answer(body, prompt)


def whole_answer(body: bytes, prompt: PromptUsage | None) -> bytes:
    """Returns a whole answer without handles, counting the prompt as the prefill engine does.

    Raises ApiError (502) when it cannot be read.
    """
    try:
        body = without_params(body)
    except ValueError as error:
        raise ApiError(502, "the decode engine's answer is not valid") from error
    return with_prompt(body, prompt) if prompt else body


class Checked:
    """A stream as the client gets it: without handles, counting the prompt as the prefill engine does, and whole.

    An engine's stream that ends without saying so is broken: a connection that closes looks like an end.
    """

    def __init__(self, stream: Stream, prompt: PromptUsage | None, endpoint: Endpoint = Endpoint.CHAT) -> None:
        self._stream = stream
        self._lines = CleanLines(endpoint)
        self._usage = UsageLines(prompt, longest_line(endpoint)) if prompt else None
        self.status = stream.status
        self.headers = stream.headers
        self.complete = False
        """Whether the whole body has been yielded."""

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the body as it comes. Raises EngineError."""
        async with aclosing(self._stream.chunks()) as chunks:
            async for chunk in chunks:
                if passed := self._passed(chunk):
                    yield passed
        rest = self._passed(None)
        if not self._lines.done:
            raise EngineError(Failure.DISCONNECTED)
        if rest:
            yield rest
        self.complete = True

    async def read(self) -> bytes:
        """Returns the body. Raises EngineError."""
        return b"".join([chunk async for chunk in self.chunks()])

    def _passed(self, chunk: bytes | None) -> bytes:
        try:
            lines = self._lines.rest() if chunk is None else self._lines.feed(chunk)
        except ValueError as error:
            raise EngineError(Failure.FAULT) from error
        if self._usage is None:
            return lines
        return self._usage.feed(lines) + (self._usage.rest() if chunk is None else b"")


async def with_error_event(stream: Stream, path: str) -> AsyncGenerator[bytes]:
    """Yields a stream of events that comes in whole lines, as `Checked` does.

    One that breaks ends with an error event, of the form at ``path``.
    """
    sent = b""
    try:
        async with aclosing(stream.chunks()) as chunks:
            async for chunk in chunks:
                sent = chunk
                yield chunk
    except EngineError as error:
        # A blank line ends what was sent of the event before.
        apart = b"" if sent.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
        yield apart + error.as_api_error("decode").event_at(path)


class Labelled:
    """Remembers a turn's keys while its answer goes out, and for a moment after; forgets them when it breaks."""

    def __init__(self, fresh: FreshKeys, scope: str, keys: Sequence[str], outcome: Outcome, stream: Stream) -> None:
        self._fresh = fresh
        self._scope = scope
        self._keys = keys
        self._outcome = outcome
        self._stream = stream

    def __enter__(self) -> None:
        for key in self._keys:
            self._fresh.note(self._scope, key)

    def __exit__(self, exc_type: type[BaseException] | None, exc: object, traceback: object) -> None:
        if exc_type is None and not self._stream.complete:
            self._outcome.result = "broken"
        renew = self._fresh.note if self._stream.complete else self._fresh.forget
        for key in self._keys:
            renew(self._scope, key)


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of an engine's answer that mean something to the client."""
    lower = {name.lower(): value for name, value in headers.items()}
    return {
        name: value
        for name, value in lower.items()
        if name in ("content-type", "retry-after") or name.startswith("x-ratelimit-")
    }
