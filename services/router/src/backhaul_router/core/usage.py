"""Token counts for the client: the prompt's from the prefill engine, the answer's from the decode engine.

To a decode engine every block that it was handed is a cache hit, so it calls nearly the whole prompt cached. Where it
speaks of cached tokens, the prefill engine's word is put in its place; all other bytes stay.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from backhaul_router.core.sse import MAX_LINE_BYTES, WholeLines

_CHAT, _RESPONSES, _MESSAGES = "prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"
_MARKS = tuple(name.encode() for name in (_CHAT, _RESPONSES, _MESSAGES))
"""By which usage of the endpoints is told apart, where it speaks of cached tokens."""

_INSIDE = ("response", "message")
"""Fields of events that hold a whole answer, as far as it has come."""

_NULL = b"null"

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_count = msgspec.json.Decoder(int).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """What a prefill engine counted."""

    token_count: int
    details: bytes
    """vLLM's prompt_tokens_details, a JSON value; ``null`` when unknown."""

    @property
    def cached(self) -> int | None:
        """Tokens that were not computed; None when unknown."""
        return _decode_details(self.details).cached_tokens


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


_decode_details_or_null = msgspec.json.Decoder(_Details | None).decode


def _decode_details(details: bytes) -> _Details:
    try:
        return _decode_details_or_null(details) or _Details()
    except (msgspec.MsgspecError, ValueError):
        return _Details()


class ReplyUsage(msgspec.Struct):
    """What an engine's whole answer says was used, whatever its endpoint."""

    prompt_tokens: _Count = 0
    prompt_tokens_details: msgspec.Raw = msgspec.Raw(_NULL)
    input_tokens: _Count = 0
    """Without the cached ones in Anthropic's form, which says how many those are if the server is told to."""
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None

    @property
    def prompt(self) -> PromptUsage:
        """What it says of the prompt."""
        if self.input_tokens_details is not None:
            return PromptUsage(self.input_tokens, _encode(self.input_tokens_details))
        if self.cache_read_input_tokens is not None:
            created = self.cache_creation_input_tokens or 0
            details = _Details(self.cache_read_input_tokens)
            return PromptUsage(self.input_tokens + created + self.cache_read_input_tokens, _encode(details))
        return PromptUsage(self.prompt_tokens or self.input_tokens, bytes(self.prompt_tokens_details))


def with_prompt(document: bytes, prompt: PromptUsage) -> bytes:
    """Returns a decode engine's JSON document with the prefill engine's counts of the prompt.

    As it came when it does not speak of cached tokens, or cannot be read.
    """
    if not _speaks(document):
        return document
    try:
        fields = _decode_fields(document)
        inside = next((name for name in _INSIDE if "usage" not in fields and name in fields), "")
        answer = _decode_fields(fields[inside]) if inside else fields
        usage = _decode_fields(answer.get("usage", b"{}"))
        if not _correct(usage, prompt):
            return document
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return document
    answer["usage"] = msgspec.Raw(_encode(usage))
    if inside:
        fields[inside] = msgspec.Raw(_encode(answer))
    return _encode(fields)


def _correct(usage: dict[str, msgspec.Raw], prompt: PromptUsage) -> bool:
    """Puts the prefill engine's counts into usage. Tells whether there was anything to correct."""
    told = next((name for name in (_CHAT, _RESPONSES, _MESSAGES) if bytes(usage.get(name, _NULL)) != _NULL), "")
    if told == _CHAT:
        _put(usage, prompt_tokens=prompt.token_count, total_tokens=prompt.token_count + _in(usage, "completion_tokens"))
        usage[_CHAT] = msgspec.Raw(prompt.details)
    elif told and prompt.cached is None:
        return False
    elif told == _RESPONSES:
        _put(usage, input_tokens=prompt.token_count, total_tokens=prompt.token_count + _in(usage, "output_tokens"))
        details = _decode_fields(usage[_RESPONSES])
        _put(details, cached_tokens=prompt.cached)
        if details.get("cached_tokens_per_turn"):
            _put(details, cached_tokens_per_turn=[prompt.cached])
        usage[_RESPONSES] = msgspec.Raw(_encode(details))
    elif told == _MESSAGES:
        rest = prompt.token_count - (prompt.cached or 0) - _in(usage, "cache_creation_input_tokens")
        _put(usage, input_tokens=max(0, rest), cache_read_input_tokens=prompt.cached)
    return bool(told)


def _put(fields: dict[str, msgspec.Raw], **values: object) -> None:
    fields.update({name: msgspec.Raw(_encode(value)) for name, value in values.items()})


def _in(usage: dict[str, msgspec.Raw], name: str) -> int:
    return _decode_count(usage.get(name, b"0"))


class UsageLines:
    """The same for a stream of server-sent events, piece by piece. Only the end of an unfinished line is held back."""

    def __init__(self, prompt: PromptUsage, longest: int = MAX_LINE_BYTES) -> None:
        """``longest``: a line of more bytes is left as it is."""
        self._prompt = prompt
        self._lines = WholeLines(longest)

    def feed(self, piece: bytes) -> bytes:
        """Returns what can be passed on after this piece."""
        lines = self._lines.take(piece)
        return self._corrected(lines) if _speaks(lines) else lines

    def rest(self) -> bytes:
        """Returns what was held back when the stream ended."""
        return self._lines.rest()

    def _corrected(self, lines: bytes) -> bytes:
        return b"".join(map(self._line, lines.splitlines(keepends=True)))

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or not _speaks(line):
            return line
        data = line[5:].strip()
        corrected = with_prompt(data, self._prompt)
        return line if corrected is data else line.replace(data, corrected)


def _speaks(text: bytes) -> bool:
    """Tells whether cached tokens may be spoken of."""
    # Asked of every event: a generator over the marks takes four times as long.
    return _MARKS[0] in text or _MARKS[1] in text or _MARKS[2] in text
