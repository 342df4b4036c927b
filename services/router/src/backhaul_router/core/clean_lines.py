"""Answers of decode engines as clients get them: without handles, and whole."""

import re

import msgspec

from backhaul_router.core.body import Endpoint
from backhaul_router.core.sse import MAX_LINE_BYTES, MAX_RESPONSE_LINE_BYTES, WholeLines

_PARAMS = "kv_transfer_params"
_NAME = _PARAMS.encode()
_RESPONSE = "response"
"""In events of `/v1/responses`: the answer as far as it has come, or all of it."""

_DONE = re.compile(rb"[\r\n]data: ?\[DONE\]\s*\Z")
_PARAMS_LEFT = re.compile(rb'kv_transfer_params"\s*:\s*[^\sn]')
"""As a key, of more than null: in a string of an answer's text a quote has a backslash before it."""

_LAST_EVENTS = {
    Endpoint.RESPONSES: (b"response.completed", b"response.incomplete", b"response.failed", b"error"),
    Endpoint.MESSAGES: (b"message_stop", b"error"),
}
"""Names of the events that end a stream, where it is not `[DONE]` (`responses/serving.py`, `anthropic/serving.py`)."""
_BLANK = re.compile(rb"(\n|\r\n?)(\n|\r\n?)\Z")
_TAIL_BYTES = 64

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def without_params(reply: bytes) -> bytes:
    """Returns a decode engine's reply, or an event, without kv_transfer_params; all other bytes and their order stay.

    Raises ValueError when it cannot be told apart.
    """
    if _NAME not in reply:
        return reply
    try:
        fields = _decode_fields(reply)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("not a JSON object") from error
    inner = bytes(fields.get(_RESPONSE, b""))
    if inner.startswith(b"{"):
        fields[_RESPONSE] = msgspec.Raw(without_params(inner))
    found = fields.pop(_PARAMS, None) is not None or bytes(fields.get(_RESPONSE, b"")) != inner
    return _encode(fields) if found else reply


def longest_line(endpoint: Endpoint) -> int:
    """Returns how long a line of a stream may be to be looked at as a whole, bytes."""
    return MAX_RESPONSE_LINE_BYTES if endpoint is Endpoint.RESPONSES else MAX_LINE_BYTES


class CleanLines:
    """A stream of server-sent events without kv_transfer_params, piece by piece. Remembers how it ends.

    Only the end of an unfinished line is held back.
    """

    def __init__(self, endpoint: Endpoint = Endpoint.CHAT) -> None:
        self._lines = WholeLines(longest_line(endpoint))
        self._last_events = _LAST_EVENTS.get(endpoint)
        self._event = b""
        self._tail = b"\n"

    @property
    def done(self) -> bool:
        """Whether what has been passed on ends as vLLM ends every stream (`chat_completion/serving.py`)."""
        if self._last_events is None:
            return _DONE.search(self._tail) is not None
        return self._event in self._last_events and _BLANK.search(self._tail) is not None

    def feed(self, piece: bytes) -> bytes:
        """Returns what can be passed on after this piece. Raises ValueError for params that cannot be taken out."""
        return self._clean(self._lines.take(piece))

    def rest(self) -> bytes:
        """Returns what was held back when the stream ended. Raises ValueError too."""
        return self._clean(self._lines.rest())

    def _clean(self, lines: bytes) -> bytes:
        shown = self._tail + lines
        # Once for both: a name that begins in what was passed on before is whole in the two together only.
        if _NAME in shown:
            lines = b"".join(map(_without_params_in, lines.splitlines(keepends=True)))
            shown = self._tail + lines
            if _PARAMS_LEFT.search(shown):
                raise ValueError("kv_transfer_params where they cannot be taken out")
        if self._last_events is not None:
            self._note_event(lines)
        self._tail = shown[-_TAIL_BYTES:]
        return lines

    def _note_event(self, lines: bytes) -> None:
        whole = lines.splitlines()
        if not self._tail.endswith((b"\n", b"\r")):
            # The rest of a long line.
            whole = whole[1:]
        names = [line[6:].strip() for line in whole if line.startswith(b"event:")]
        self._event = names[-1] if names else self._event


def _without_params_in(line: bytes) -> bytes:
    if not line.startswith(b"data:") or _NAME not in line:
        return line
    data = line[5:].strip()
    try:
        return line.replace(data, without_params(data))
    except ValueError:
        return line
