"""What the headers of an HTTP request say of a turn."""

import math
import re
import secrets
from collections.abc import Mapping

from backhaul_common.trace_context import context_from
from backhaul_router.core.body import Endpoint
from backhaul_router.core.errors import invalid
from backhaul_router.ports import TurnRequest

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Of an answer that nobody on its way may hold back."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""By which a caller's trace goes on."""

_ID_BYTES = 16
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_TIMEOUT = "x-envoy-expected-rq-timeout-ms"
"""Says how long the gateway waits for the answer. HTTP has no such header of its own, and Envoy sends this one."""
_TIMEOUT_DIGITS = 15


def turn_request(endpoint: Endpoint, headers: Mapping[str, str], body: bytes, tenant: str) -> TurnRequest:
    """Returns the turn that a request asks for."""
    return TurnRequest(
        endpoint=endpoint,
        body=body,
        tenant=tenant,
        session_id=headers.get("x-session-id") or headers.get("x-conversation-id"),
        authorization=authorization_in(headers, endpoint.value),
        reuse=headers.get("x-backhaul-reuse", "").lower() != "off",
        explain=headers.get("x-backhaul-explain", "").lower() == "on",
        parent=context_from({name: headers[name] for name in TRACE_HEADERS if name in headers}),
    )


def authorization_in(headers: Mapping[str, str], path: str) -> str | None:
    """Returns who asks: clients of Anthropic's endpoints bring their key in a header of its own."""
    key = headers.get("x-api-key") if path.startswith(Endpoint.MESSAGES.value) else None
    return headers.get("authorization") or (f"Bearer {key}" if key else None)


def request_id_in(headers: Mapping[str, str]) -> str:
    """Returns the client's id when it is safe to repeat, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else secrets.token_hex(_ID_BYTES)


def left_s(headers: Mapping[str, str]) -> float:
    """Returns how long the answer is waited for, seconds; 0, or none given, is without limit. Raises ApiError (400)."""
    text = headers.get(_TIMEOUT, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= _TIMEOUT_DIGITS):
        raise invalid(f"the header {_TIMEOUT} must be a whole number of milliseconds", param=_TIMEOUT)
    return int(text) / 1000 or math.inf
