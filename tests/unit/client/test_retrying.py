"""When the client makes a call again."""

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from backhaul_client.errors import BackhaulError, LimitReachedError, UnavailableError
from backhaul_client.retrying import Retries


class NoChance:
    """Adds nothing to waits."""

    def random(self) -> float:
        return 0.0


def retries(**options: float) -> tuple[Retries, list[float]]:
    """Returns retries that wait for nothing, and how long they would have waited."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    return Retries(rng=NoChance(), sleep=sleep, **options), waits  # type: ignore[arg-type]  # all that is asked of it


def wait_s(error: BackhaulError, *, attempt: int = 1, idempotent: bool = False, left_s: float = 100.0) -> float | None:
    return retries()[0].wait_s(error, attempt, idempotent=idempotent, left_s=left_s)


full = LimitReachedError("TOO_MANY_TURNS", "full", retry_after_s=2.0)
unconnected = UnavailableError("UNAVAILABLE", "no connection")


def test_a_turn_is_repeated_only_when_nothing_had_begun() -> None:
    assert wait_s(full) == 2.0
    assert wait_s(unconnected) is None
    assert wait_s(UnavailableError("NO_CAPACITY", "the decode engine failed", retry_after_s=1.0)) is None


def test_an_idempotent_call_is_repeated_without_a_connection_too() -> None:
    assert wait_s(unconnected, idempotent=True) == 0.1
    assert wait_s(unconnected, idempotent=True, attempt=2) == 0.2
    assert wait_s(LimitReachedError("BODY_LIMIT", "large"), idempotent=True) is None


def test_calls_are_limited_in_number_and_in_time() -> None:
    assert wait_s(full, attempt=3) is None
    assert wait_s(full, left_s=1.9) is None
    assert wait_s(LimitReachedError("TOO_MANY_TURNS", "full", retry_after_s=60.0)) is None


async def failing_with(*errors: grpc.aio.AioRpcError) -> tuple[list[float], Sequence[object]]:
    policy, waits = retries()
    left = list(errors)

    async def call(left_s: float) -> str:
        if left:
            raise left.pop(0)
        return "done"

    outcomes = await asyncio.gather(policy.run(call, timeout_s=100.0, idempotent=True), return_exceptions=True)
    return waits, outcomes


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no")


async def test_a_call_that_works_in_the_end_answers() -> None:
    assert await failing_with(*[rpc_error(grpc.StatusCode.UNAVAILABLE)] * 2) == ([0.1, 0.2], ["done"])


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_what_would_fail_again_or_may_have_worked_is_raised_at_once(code: grpc.StatusCode) -> None:
    waits, (error,) = await failing_with(rpc_error(code))

    assert waits == []
    assert isinstance(error, BackhaulError)
    assert (error.reason, str(error)) == (code.name, f"no ({code.name})")
