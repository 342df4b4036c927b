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
    """It answered another 5xx, or that the request failed."""


RETRYABLE = frozenset({Failure.REFUSED, Failure.DISCONNECTED, Failure.UNAVAILABLE})
"""Failures of a cold leg that another node may not have."""

_STATUS = {Failure.REFUSED: 503, Failure.UNAVAILABLE: 503, Failure.TIMEOUT: 504}


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
        if self.status in (502, 503, 504):
            return Failure.UNAVAILABLE
        return None if 200 <= self.status < 300 or 400 <= self.status < 500 else Failure.FAULT
