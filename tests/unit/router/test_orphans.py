"""Nodes without their agent serve for as long as their engine answers."""

import asyncio

import pytest

from backhaul_router import engine_client
from backhaul_router.core.engines import Failure
from backhaul_router.core.nodes import NodeTable
from backhaul_router.orphans import INTERVAL_S, watch_orphans
from tests.fakes.vllm_http import FakeVllmHttp
from tests.unit.router.test_nodes import node


class FakeHealth:
    """Engines that fail one look after the other as told, the last way for ever; others refuse."""

    def __init__(self, **looks: list[Failure | None]) -> None:
        self._looks = {f"http://{node_id}:2/health": failures for node_id, failures in looks.items()}

    async def health_failure(self, url: str) -> Failure | None:
        failures = self._looks.get(url, [Failure.REFUSED])
        return failures.pop(0) if len(failures) > 1 else failures[0]


class EndingClock:
    """A clock that ends its caller after some sleeps."""

    def __init__(self, sleeps: int) -> None:
        self._left = sleeps

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        assert seconds == INTERVAL_S
        self._left -= 1
        if not self._left:
            raise asyncio.CancelledError


async def test_an_engine_that_does_not_answer_is_dropped_and_told() -> None:
    table, told = NodeTable(), []
    table.replace([node("p1"), node("d1")])
    table.replace([])

    with pytest.raises(asyncio.CancelledError):
        await watch_orphans(table, FakeHealth(p1=[None]), EndingClock(2), lambda: told.append(1))

    assert [orphan.node_id for orphan in table.orphans] == ["p1"]
    assert told == [1]


@pytest.mark.parametrize(
    ("looks", "dropped"),
    [
        ([Failure.TIMEOUT, Failure.TIMEOUT, None], False),
        ([Failure.TIMEOUT, Failure.TIMEOUT, None, Failure.TIMEOUT, Failure.TIMEOUT, None], False),
        ([Failure.TIMEOUT, Failure.TIMEOUT, Failure.TIMEOUT, None], True),
        ([Failure.REFUSED, None], True),
        ([Failure.UNAVAILABLE, None], True),
    ],
    ids=["late-twice", "late-twice-and-again", "late-three-times", "refused-once", "unavailable-once"],
)
async def test_only_an_engine_that_is_merely_late_gets_more_looks(looks: list[Failure | None], dropped: bool) -> None:
    table = NodeTable()
    table.replace([node("p1")])
    table.replace([])

    with pytest.raises(asyncio.CancelledError):
        await watch_orphans(table, FakeHealth(p1=[*looks]), EndingClock(len(looks)), lambda: None)

    assert (table.orphans == []) == dropped


async def test_an_engine_that_is_merely_late_is_told_from_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "_HEALTH_TIMEOUT_S", 0.2)
    limits = engine_client.EngineTimeouts(connect_s=0.05, prefill_s=1, warm_prefill_s=1, first_byte_s=1, idle_s=1)
    async with engine_client.EngineClient(timeouts=limits, answer_bytes=1024, late_limit=1) as engines:
        async with FakeVllmHttp() as http:
            url = f"{http.url}/health"
            assert await engines.health_failure(url) is None
            http.late_count = 1
            assert await engines.health_failure(url) is Failure.TIMEOUT
            http.healthy = False
            assert await engines.health_failure(url) is Failure.UNAVAILABLE
        assert await engines.health_failure(url) is Failure.REFUSED
