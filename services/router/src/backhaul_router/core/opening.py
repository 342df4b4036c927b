"""Whether a decode engine's answer begins well.

vLLM answers a request whose blocks could not be loaded with 200: a stream's first event says who speaks, the next that
the request failed (`chat_completion/serving.py`, ``chat_completion_stream_generator``). Until something of the answer
is there, such a turn can be repeated.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec

MAX_OPENING_BYTES = 64 * 1024
"""An opening longer than this is an answer."""

MAX_ACCEPTED_BYTES = 1024 * 1024
"""The same where it repeats what was asked, as `/v1/responses` does, twice."""

_NOTHING: Sequence[object] = (None, "", [], {})

_ACCEPTED = ("response.created", "response.queued", "response.in_progress")
_WHO_SPEAKS = ("message_start", "ping")
"""Types of events that hold nothing of an answer."""


class Opening(Enum):
    """What the first bytes of an answer show."""

    ACCEPTED = "accepted"
    """Only that the request was taken: `/v1/responses` says so before anything is computed."""
    UNDECIDED = "undecided"
    """Nothing yet: an event is not complete, or only says who speaks."""
    ANSWER = "answer"
    FAILED = "failed"
    """The request failed before anything of an answer was there."""


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Document(msgspec.Struct):
    type: str = ""
    error: Any = None
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Document).decode


def opening_of(stream: bytes) -> Opening:
    """Judges the first bytes of a stream of server-sent events."""
    shown = Opening.UNDECIDED
    if len(stream) > MAX_ACCEPTED_BYTES:
        return Opening.ANSWER
    lines = stream.replace(b"\r", b"\n").split(b"\n")
    for line in lines[:-1]:
        if line.startswith(b"data:"):
            shown = _shown_by(line[5:])
            if shown not in (Opening.UNDECIDED, Opening.ACCEPTED):
                return shown
        elif line.startswith(b"event:") and line[6:].strip().decode(errors="replace") in _ACCEPTED:
            # Its data may be long, and be on their way.
            shown = Opening.ACCEPTED
    return Opening.ANSWER if shown is Opening.UNDECIDED and len(stream) > MAX_OPENING_BYTES else shown


def failed_whole(body: bytes) -> bool:
    """Tells whether a whole answer says that the request failed."""
    # Looked for before it is parsed: answers can be long, and hardly any says so.
    return b'"error"' in body and _shown_by(body) is Opening.FAILED


def _shown_by(data: bytes) -> Opening:
    try:
        document = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Opening.ANSWER
    if document.error is not None:
        return Opening.ANSWER if _blames_the_client(document.error) else Opening.FAILED
    if document.type in _ACCEPTED:
        return Opening.ACCEPTED
    if document.type in _WHO_SPEAKS:
        return Opening.UNDECIDED
    if any(choice.finish_reason == "error" for choice in document.choices):
        return Opening.FAILED
    speaks = not document.choices or any(_says_something(choice) for choice in document.choices)
    return Opening.ANSWER if speaks else Opening.UNDECIDED


def _says_something(choice: _Choice) -> bool:
    said = {name: value for name, value in (choice.delta or {}).items() if name != "role" and value not in _NOTHING}
    return bool(choice.text or choice.finish_reason or said or choice.delta is None)


def _blames_the_client(error: object) -> bool:
    code = error.get("code") if isinstance(error, dict) else None
    return isinstance(code, int) and 400 <= code < 500
