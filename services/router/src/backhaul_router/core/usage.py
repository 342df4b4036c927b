"""Token counts for the client: the prompt's from the prefill engine, the answer's from the decode engine.

To a decode engine every block that it was handed is a cache hit, so it calls nearly the whole prompt cached. Where it
speaks of cached tokens, the prefill engine's word is put in its place; all other bytes stay.
"""

from dataclasses import dataclass

import msgspec

from backhaul_router.core.sse import WholeLines

_DETAILS = "prompt_tokens_details"
_MARK = _DETAILS.encode()
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


def with_prompt(document: bytes, prompt: PromptUsage) -> bytes:
    """Returns a decode engine's JSON document with the prefill engine's counts of the prompt.

    As it came when it does not speak of cached tokens, or cannot be read.
    """
    if _MARK not in document:
        return document
    try:
        fields = _decode_fields(document)
        usage = _decode_fields(fields.get("usage", b"{}"))
        if bytes(usage.get(_DETAILS, _NULL)) == _NULL:
            return document
        completion = _decode_count(usage.get("completion_tokens", b"0"))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return document
    usage[_DETAILS] = msgspec.Raw(prompt.details)
    usage["prompt_tokens"] = msgspec.Raw(_encode(prompt.token_count))
    usage["total_tokens"] = msgspec.Raw(_encode(prompt.token_count + completion))
    fields["usage"] = msgspec.Raw(_encode(usage))
    return _encode(fields)


class UsageLines:
    """The same for a stream of server-sent events, piece by piece. Only the end of an unfinished line is held back."""

    def __init__(self, prompt: PromptUsage) -> None:
        self._prompt = prompt
        self._lines = WholeLines()

    def feed(self, piece: bytes) -> bytes:
        """Returns what can be passed on after this piece."""
        lines = self._lines.take(piece)
        return self._corrected(lines) if _MARK in lines else lines

    def rest(self) -> bytes:
        """Returns what was held back when the stream ended."""
        return self._lines.rest()

    def _corrected(self, lines: bytes) -> bytes:
        return b"".join(map(self._line, lines.splitlines(keepends=True)))

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or _MARK not in line:
            return line
        data = line[5:].strip()
        corrected = with_prompt(data, self._prompt)
        return line if corrected is data else line.replace(data, corrected)
