"""Which endpoint a call goes to, and how often."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul_common.errors import (
    AbortedError,
    BackhaulError,
    FailedPreconditionError,
    InternalError,
    UnauthenticatedError,
    UnavailableError,
)
from backhaul_common.etcd import failures
from backhaul_common.etcd.connection import Connection
from backhaul_common.trace_context import traceparent_of
from tests.fakes.clock import FakeClock


class _Clock(FakeClock):
    """Sleeping moves the time."""

    async def sleep(self, seconds: float) -> None:
        self._now += seconds


def rpc_error(code: grpc.StatusCode, text: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


GONE = rpc_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")
NOT_SENT = rpc_error(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: x")
SILENT = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED)


class _Channels(Connection):
    """Opens nothing: a channel is the name of its endpoint."""

    def channel(self, index: int | None = None) -> Any:
        return "abc"[index or 0]


class _Guarded(_Channels):
    """Asks for a token, and counts how often."""

    authenticated_count = 0

    async def _authenticate(self, timeout_s: float) -> str:
        self.authenticated_count += 1
        return f"token-{self.authenticated_count}"


class Cluster:
    """Endpoints a, b, c; ``answers`` says what each does."""

    def __init__(self, answers: dict[str, Any], user: str = "") -> None:
        self.clock = _Clock()
        self.calls: list[str] = []
        self.timeouts: list[float] = []
        self.answers = answers
        self.connection = _Guarded(
            endpoints=("a", "b", "c"), tls=None, user=user, password="", attempt_s=1.0, clock=self.clock
        )

    def attempt(self) -> Callable[..., Awaitable[str]]:
        async def attempt(channel: Any, _metadata: Any, left_s: float) -> str:
            self.calls.append(channel)
            self.timeouts.append(left_s)
            answer = self.answers[channel]
            if isinstance(answer, Exception):
                if answer is SILENT:
                    await self.clock.sleep(left_s)
                raise answer
            return str(answer)

        return attempt

    async def call(self, *, repeatable: bool = True, total_s: float = 3.0) -> str:
        return await self.connection.call(self.attempt(), repeatable=repeatable, total_s=total_s)


async def test_the_endpoint_that_answers_stays_in_use() -> None:
    cluster = Cluster({"a": GONE, "b": "yes", "c": "yes"})
    assert await cluster.call() == "yes"
    assert await cluster.call() == "yes"
    assert cluster.calls == ["a", "b", "b"]
    assert cluster.connection.endpoint == "b"


async def test_a_silent_endpoint_costs_one_attempt() -> None:
    cluster = Cluster({"a": SILENT, "b": "yes", "c": "yes"})
    started = cluster.clock.monotonic()
    assert await cluster.call() == "yes"
    assert cluster.clock.monotonic() - started == 1.0


async def test_a_write_that_may_have_happened_is_not_repeated_and_one_that_did_not_is() -> None:
    cluster = Cluster({"a": GONE, "b": "yes", "c": "yes"})
    with pytest.raises(UnavailableError, match="ETCD_UNAVAILABLE"):
        await cluster.call(repeatable=False)
    cluster = Cluster({"a": NOT_SENT, "b": "yes", "c": "yes"})
    assert await cluster.call(repeatable=False) == "yes"


@pytest.mark.parametrize("failure", [GONE, SILENT], ids=["dead", "silent"])
async def test_no_call_takes_longer_than_its_total(failure: Exception) -> None:
    cluster = Cluster({"a": failure, "b": failure, "c": failure})
    started = cluster.clock.monotonic()
    with pytest.raises(UnavailableError, match="ETCD_UNAVAILABLE"):
        await cluster.call(total_s=2.5)
    assert cluster.clock.monotonic() - started <= 2.5
    assert max(cluster.timeouts) <= 1.0
    assert {"a", "b", "c"} <= set(cluster.calls)


@pytest.mark.parametrize(("total_s", "token_count"), [(0.04, 1), (3.0, 2)], ids=["a lookup's time", "a whole attempt"])
async def test_a_token_is_doubted_when_a_call_with_time_enough_is_not_answered(
    total_s: float, token_count: int
) -> None:
    cluster = Cluster({"a": "yes", "b": "yes", "c": "yes"}, user="registry")
    assert await cluster.call() == "yes"
    await cluster.clock.sleep(60.0)
    cluster.answers["a"] = SILENT
    with contextlib.suppress(UnavailableError):
        await cluster.call(total_s=total_s)
    assert await cluster.call() == "yes"
    assert cluster.connection.authenticated_count == token_count


@pytest.mark.parametrize(
    ("code", "text", "cls", "reason"),
    [
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", AbortedError, "ETCD_COMPACTED"),
        ("NOT_FOUND", "etcdserver: requested lease not found", AbortedError, "LEASE_LOST"),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", FailedPreconditionError, "ETCD_NO_SPACE"),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", UnavailableError, "ETCD_BUSY"),
        (
            "INVALID_ARGUMENT",
            "etcdserver: authentication failed, invalid user ID or password",
            UnauthenticatedError,
            "ETCD_AUTH",
        ),
        ("PERMISSION_DENIED", "etcdserver: permission denied", UnauthenticatedError, "ETCD_AUTH"),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", UnauthenticatedError, "ETCD_AUTH"),
        ("UNAVAILABLE", "etcdserver: leader changed", UnavailableError, "ETCD_UNAVAILABLE"),
        ("UNAVAILABLE", "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED", UnavailableError, "ETCD_TLS"),
        ("INTERNAL", "Internal error from Core", UnavailableError, "ETCD_UNAVAILABLE"),
        ("INTERNAL", "what", InternalError, "ETCD_ERROR"),
        ("UNKNOWN", "what", InternalError, "ETCD_ERROR"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "",
)
def test_what_etcd_says_becomes_an_error_of_ours(code: str, text: str, cls: type[BackhaulError], reason: str) -> None:
    error = failures.to_backhaul(rpc_error(grpc.StatusCode[code], text), "e:1")
    assert (type(error), error.reason) == (cls, reason)


async def test_etcd_is_told_the_trace_of_a_call_that_is_part_of_one(spans: InMemorySpanExporter) -> None:
    told: list[dict[str, str]] = []

    async def attempt(_channel: Any, metadata: Any, _left_s: float) -> None:
        told.append(dict(metadata))

    connection = Cluster({}).connection
    with trace.get_tracer("test").start_as_current_span("etcd.txn") as span:
        current = traceparent_of(span)
        await connection.call(attempt, repeatable=False, total_s=1.0)
    await connection.call(attempt, repeatable=False, total_s=1.0)

    assert told == [{"traceparent": current}, {}]
