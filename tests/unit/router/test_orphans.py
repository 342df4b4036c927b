"""Nodes without their agent serve for as long as their engine answers."""

import asyncio

import pytest

from backhaul_router.core.nodes import NodeTable
from backhaul_router.orphans import INTERVAL_S, watch_orphans
from tests.unit.router.test_nodes import node


class FakeHealth:
    """Engines of which some are well."""

    def __init__(self, *well: str) -> None:
        self.well = {*well}

    async def healthy(self, url: str) -> bool:
        return url in self.well


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
        await watch_orphans(table, FakeHealth("http://p1:2/health"), EndingClock(2), lambda: told.append(1))

    assert [orphan.node_id for orphan in table.orphans] == ["p1"]
    assert told == [1]
