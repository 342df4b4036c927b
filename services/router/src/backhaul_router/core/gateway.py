"""Requests and answers of which a gateway moves the bytes: what of their heads counts, and what of it passes."""

from collections.abc import Iterable, Mapping

from backhaul_router.core.body import Endpoint
from backhaul_router.core.engines import Failure, failure_in
from backhaul_router.core.errors import ApiError
from backhaul_router.core.sse import is_events

DESTINATION = "x-gateway-destination-endpoint"
"""Where a request is to go, host:port. Name and use are those of the Gateway API Inference Extension's protocol for
endpoint pickers (`docs/proposals/004-endpoint-picker-protocol`), like those below."""
SUBSET = f"{DESTINATION}-subset"
"""Where it may go, as the gateway says."""
SERVED = f"{DESTINATION}-served"
"""Where it went, as the gateway says."""

EXPECTATION = "backhaul-expectation"
"""What the picker expects of the decode leg, beside the destination: for the gateway's access log."""
FIRST_BYTE = "first-byte-us"
"""In the gateway's access log: microseconds from the request to the engine to the first byte of its answer's body."""

_NOT_OURS = ("host", "x-envoy-")
"""Of requests and answers: what gateways let nobody change."""

_OF_ANSWERS = ("content-type", "content-length", "transfer-encoding", "retry-after", "x-ratelimit-")
"""What of an engine's answer means something to the client."""

_FIRST_BYTE_DIGITS = 11
"""More than a day is nobody's."""

_NO_CONNECTION = ("connection_failure", "connection_timeout")


def endpoint_of(headers: Mapping[str, str], *, body_limit: int) -> Endpoint:
    """Returns the endpoint of a request that begins a turn. Raises ApiError (404, 405, 413, 415) for any other."""
    path = headers.get(":path", "").partition("?")[0]
    endpoint = next((endpoint for endpoint in Endpoint if endpoint.value == path), None)
    if endpoint is None:
        raise ApiError(404, "there is no such path here")
    if headers.get(":method") != "POST":
        raise ApiError(405, "use POST", headers={"allow": "POST"})
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the content type must be application/json")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the body must not be encoded")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > body_limit:
        raise too_large(body_limit)
    return endpoint


def too_large(body_limit: int) -> ApiError:
    """Returns a 413."""
    return ApiError(413, f"the body is larger than {body_limit} bytes, which is this router's limit")


def not_for_engines(names: Iterable[str]) -> list[str]:
    """Returns which headers of a request no engine gets: all that can be taken away.

    Whatever an engine is to be told is set anew. So clients can name neither engines nor ranks nor requests.
    """
    return [name for name in names if not name.startswith((":", *_NOT_OURS))]


def not_for_clients(names: Iterable[str]) -> list[str]:
    """Returns which headers of an engine's answer no client gets."""
    return [name for name in names if not name.startswith((":", *_NOT_OURS, *_OF_ANSWERS))]


def failure_told(status: int, details: str) -> Failure | None:
    """Returns how an engine failed, by an answer that may be the gateway's own.

    ``details`` is Envoy's attribute ``response.code_details``; empty where the gateway sends none: then the status
    alone counts. (`response_code_details.rst` in its documentation)
    """
    if own_answer(details):
        if any(reason in details for reason in _NO_CONNECTION):
            return Failure.REFUSED
        return Failure.TIMEOUT if "timeout" in details else Failure.DISCONNECTED
    return failure_in(status)


def own_answer(details: str) -> bool:
    """Tells whether an answer is the gateway's own: no engine gave it."""
    return details not in ("", "via_upstream")


def comes_whole(status: int, headers: Mapping[str, str]) -> bool:
    """Tells whether an engine's answer is no stream of events."""
    return status != 200 or not is_events(headers)


def first_byte_s(text: str) -> float | None:
    """Returns how long an engine took to the first byte of its answer's body, seconds; None if nobody says."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _FIRST_BYTE_DIGITS):
        return None
    return int(text) / 1_000_000
