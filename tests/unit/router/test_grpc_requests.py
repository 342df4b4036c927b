"""Errors of the HTTP API become those that have a status."""

import pytest

from backhaul_common.errors import (
    BackhaulError,
    DeadlineExceededError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from backhaul_common.status import RETRY_AFTER
from backhaul_router.core.engines import EngineError, Failure
from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import Refusal
from backhaul_router.grpc_requests import as_backhaul, as_statuses

_CLASSES = {429: ResourceExhaustedError, 503: UnavailableError, 504: DeadlineExceededError}


@pytest.mark.parametrize("refusal", Refusal)
@pytest.mark.parametrize("status", [429, 503, 504])
def test_a_refusal_keeps_its_reason_and_when_to_ask_again(refusal: Refusal, status: int) -> None:
    error = as_backhaul(ApiError(status, "no", code=refusal.value, headers={"retry-after": "7"}))

    assert type(error) is _CLASSES[status]
    assert (error.reason, error.metadata) == (refusal.value.upper(), {RETRY_AFTER: "7"})


@pytest.mark.parametrize(
    ("failure", "kind", "reason"),
    [
        (Failure.REFUSED, UnavailableError, "NO_CAPACITY"),
        (Failure.TIMEOUT, DeadlineExceededError, "TIMEOUT"),
        (Failure.FAULT, InternalError, "ENGINE_FAILED"),
    ],
)
def test_an_engines_failure_before_its_answer(failure: Failure, kind: type[BackhaulError], reason: str) -> None:
    error = as_backhaul(EngineError(failure).as_api_error("decode"))

    assert (type(error), error.reason, RETRY_AFTER in error.metadata) == (kind, reason, kind is UnavailableError)


def test_an_engines_failure_in_the_middle() -> None:
    with pytest.raises(InternalError, match="ENGINE_FAILED"), as_statuses():
        raise EngineError(Failure.DISCONNECTED)
