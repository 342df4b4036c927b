"""Errors that clients see, in OpenAI's form."""

from collections.abc import Mapping
from typing import Any

import msgspec

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
        self.message = message
        self.type = type or generic_type
        self.code = generic_code if code is None else code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON document ``{"error": {...}}``."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})

    @property
    def event(self) -> bytes:
        """The same as a server-sent event, for a stream that has already begun."""
        return b"data: " + self.body + b"\n\n"


def invalid(message: str, *, param: str | None = None) -> ApiError:
    """Returns a 400 about the request's body."""
    return ApiError(400, message, param=param)


def engine_answer(status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
    """Returns an engine's error answer as the client's: same status, message, type, param and code."""
    fault = _fault_in(body)
    return ApiError(
        status,
        str(fault.get("message") or "the engine refused the request"),
        type=str(fault.get("type") or ""),
        code=fault.get("code"),
        param=fault.get("param"),
        headers={name: value for name, value in headers.items() if name.lower() == "retry-after"},
    )


def _fault_in(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    fault = document.get("error", document) if isinstance(document, dict) else None
    return fault if isinstance(fault, dict) else {}
