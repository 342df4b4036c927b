"""Ending conversations when something is missing."""

import asyncio
from collections.abc import Sequence

import pytest

from backhaul_common.errors import UnavailableError
from backhaul_router.conversations import Conversations, Ending
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.claims import Released
from backhaul_router.core.errors import ApiError
from backhaul_router.core.nodes import Node, NodeTable
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Tenants
from tests.unit.router.ports import FakeClock, ready


class Away:
    """A registry that fails one of the scopes that it is asked for, and always has news of the others."""

    def __init__(self) -> None:
        self.failing = ""
        self.asked: list[str] = []

    async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> list[Pointer]:
        self.failing = self.failing or scope
        self.asked.append(scope)
        if scope == self.failing:
            raise UnavailableError("ETCD_UNAVAILABLE", "no etcd")
        return [Pointer(keys[0], f"set-{len(self.asked)}", "gone", "d1", 0, b"", 0, b"")]


class Nobody:
    """No owner is to be asked."""

    async def release_sets(
        self, address: str, set_ids: Sequence[str], *, timeout_s: float, scope: str = "", keys: Sequence[str] = ()
    ) -> Released:
        raise AssertionError(address)


def conversations(registry: Away, *nodes: Node, clock: FakeClock | None = None) -> Conversations:
    table, tenants, clock = NodeTable(), Tenants(), clock or FakeClock()
    table.change(nodes, ())
    scopes = Scopes(tenants, b"")
    return Conversations(registry=registry, owner=Nobody(), table=table, tenants=tenants, scopes=scopes, clock=clock)


async def test_without_any_node_nothing_is_said_to_be_released() -> None:
    registry = Away()
    with pytest.raises(ApiError) as caught:
        await conversations(registry).end(Ending(session_id="trip"))
    assert (caught.value.status, registry.asked) == (503, [])


async def test_nothing_goes_on_behind_an_ending_that_failed() -> None:
    registry = Away()
    with pytest.raises(ApiError) as caught:
        await conversations(registry, *ready("d1", models=frozenset({"a", "b"}))).end(Ending(session_id="trip"))
    assert caught.value.status == 503
    asked = len(registry.asked)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(registry.asked) == asked > 2


async def test_an_ending_takes_no_longer_than_its_time_however_slow_every_answer_is() -> None:
    clock = FakeClock()

    class Slow(Away):
        async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> list[Pointer]:
            self.asked.append(scope)
            clock.pass_up_to(4.0, timeout_s)
            return [Pointer(keys[0], f"set-{len(self.asked)}", "gone", "d1", 0, b"", 0, b"")]

    slow = Slow()
    begin = clock.monotonic()
    with pytest.raises(ApiError) as caught:
        await conversations(slow, *ready("d1"), clock=clock).end(Ending(session_id="trip"))
    assert caught.value.status == 503
    assert clock.monotonic() - begin <= 10.0
