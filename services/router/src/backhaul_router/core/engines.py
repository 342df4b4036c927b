"""What engines answer, and how they fail to."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from backhaul_router.core.errors import ApiError


class Failure(Enum):
    """How an engine failed to answer."""

    REFUSED = "refused"
    """No connection: nothing was sent."""
    DISCONNECTED = "disconnected"
    """The connection broke; what became of the request is unknown."""
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """It answered 502, 503 or 504."""
    FAULT = "fault"
    """It answered another 5xx."""
    ABANDONED = "abandoned"
    """It answered 200 and then that the request failed, as vLLM does when blocks could not be loaded."""
    GONE = "gone"
    """Its node left, or was not ready for long, before anything of an answer was there."""
    SOURCE_GONE = "source_gone"
    """The same of the node whose blocks it was to read."""


RETRYABLE = frozenset({Failure.REFUSED, Failure.DISCONNECTED, Failure.UNAVAILABLE, Failure.GONE})
"""Failures of a cold leg that another node may not have."""

UNANSWERED = frozenset({Failure.REFUSED, Failure.DISCONNECTED, Failure.TIMEOUT})
"""Failures that come in place of an answer."""

NOT_READ = frozenset({Failure.FAULT, Failure.ABANDONED})
"""How a leg fails whose engine could not read another's blocks (a read that hangs is a TIMEOUT)."""

_STATUS = {
    Failure.REFUSED: 503,
    Failure.UNAVAILABLE: 503,
    Failure.ABANDONED: 503,
    Failure.GONE: 503,
    Failure.SOURCE_GONE: 503,
    Failure.TIMEOUT: 504,
}


def failure_in(status: int) -> Failure | None:
    """Returns the failure that an HTTP status tells; None for success and for answers that blame the client."""
    if status in (502, 503, 504):
        return Failure.UNAVAILABLE
    return None if 200 <= status < 300 or 400 <= status < 500 else Failure.FAULT


class EngineError(Exception):
    """An engine did not answer, or stopped in the middle."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.value)
        self.failure = failure

    def as_api_error(self, leg: str) -> ApiError:
        """Returns what the client is told; ``leg`` is prefill or decode."""
        status = _STATUS.get(self.failure, 502)
        headers = {"retry-after": "1"} if status == 503 else {}
        return ApiError(status, f"the {leg} engine failed ({self.failure.value})", headers=headers)


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer of an engine."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def failure(self) -> Failure | None:
        """How it failed; None for success and for answers that blame the client."""
        return failure_in(self.status)
