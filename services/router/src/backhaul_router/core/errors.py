"""Errors that clients see, in OpenAI's form."""

from collections.abc import Mapping
from typing import Any

import msgspec

MAX_MESSAGE = 4_000
"""Longest message, characters: it may repeat what clients and engines say."""

_MAX_NAME = 200
"""The same for type, param and code."""

_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"

_GENERIC = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: ("invalid_request_error", "headers_too_large"),
    502: ("engine_error", "engine_failed"),
    503: ("unavailable_error", "no_capacity"),
    504: ("timeout_error", "timeout"),
}


class ApiError(Exception):
    """An answer other than success: HTTP status and OpenAI's error object.

    ``headers`` are sent along (`retry-after`). The message is for clients: no hosts, no keys, no content.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "",  # noqa: A002  # the field's name in OpenAI's object
        code: str | int | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message)
        generic_type, generic_code = _GENERIC.get(status, ("api_error", "internal_error"))
        self.status = status
        self.message = bounded(message, MAX_MESSAGE)
        self.type = bounded(type, _MAX_NAME) or generic_type
        self.code = generic_code if code is None else bounded(code, _MAX_NAME) if isinstance(code, str) else code
        self.param = None if param is None else bounded(param, _MAX_NAME)
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON document ``{"error": {...}}``."""
        return msgspec.json.encode({"error": self._fields})

    @property
    def _fields(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body_at(self, path: str) -> bytes:
        """The same as clients of a path expect it: those of Anthropic's look for a type beside it."""
        if not path.startswith(_MESSAGES):
            return self.body
        return msgspec.json.encode({"type": "error", "error": self._fields})

    def event_at(self, path: str) -> bytes:
        """The same as a server-sent event, for a stream that has already begun."""
        if path.startswith(_MESSAGES):
            return b"event: error\ndata: " + self.body_at(path) + b"\n\n"
        if path == _RESPONSES:
            fields = {**self._fields, "type": "error", "error": self._fields}
            return b"event: error\ndata: " + msgspec.json.encode(fields) + b"\n\n"
        return b"data: " + self.body + b"\n\n"


def invalid(message: str, *, param: str | None = None) -> ApiError:
    """Returns a 400 about the request's body."""
    return ApiError(400, message, param=param)


def too_large(limit: int) -> ApiError:
    """Returns a 502 about an engine's whole answer of more than ``limit`` bytes."""
    message = f"the answer is larger than {limit} bytes, which is this router's limit for whole ones: stream it"
    return ApiError(502, message, code="answer_too_large")


def engine_answer(status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
    """Returns an engine's error answer as the client's: same status, message, type, param and code.

    What is of a kind that OpenAI's object does not have there is left out.
    """
    fault = _fault_in(body)
    code, param = fault.get("code"), fault.get("param")
    return ApiError(
        status,
        str(fault.get("message") or "the engine refused the request"),
        type=str(fault.get("type") or ""),
        code=code if isinstance(code, str | int) and not isinstance(code, bool) else None,
        param=param if isinstance(param, str) else None,
        headers={name: value for name, value in headers.items() if name.lower() == "retry-after"},
    )


def bounded(text: str, longest: int) -> str:
    """Returns a text of at most ``longest`` characters, and dots where it was cut."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def _fault_in(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    fault = document.get("error", document) if isinstance(document, dict) else None
    return fault if isinstance(fault, dict) else {}
