"""What onlookers are told, and when."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from backhaul_router.console.state import MAX_TURNS, TICK_S, Cursor
from backhaul_router.core.console.history import STEP_S
from backhaul_router.core.lookup import keys_of
from backhaul_router.core.nodes import NodeState, Role
from backhaul_router.core.queueing import TenantLimits
from backhaul_router.core.tenants import Tenants
from tests.fakes.clock import FakeClock
from tests.fakes.console import FakeConsole, cold, node, warm
from tests.unit.router.bodies import chat

SECRET = "the launch code is 7355608"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def console(clock: FakeClock) -> FakeConsole:
    return FakeConsole(node("p1", Role.PREFILL), node("d1"), node("d2"), clock=clock)


def ids(changes: dict[str, Any]) -> list[str]:
    return [row["id"] for row in changes["nodes"]]


async def test_an_onlooker_gets_all_nodes_and_then_those_that_changed(console: FakeConsole, clock: FakeClock) -> None:
    cursor = Cursor()
    assert ids(console.state.whole(cursor)["changes"]) == ["p1", "d1", "d2"]
    console.load("d2", blocks=100)
    await clock.advance(TICK_S)
    assert ids(console.state.changes(cursor)) == ["d2"]
    await clock.advance(TICK_S)
    assert ids(console.state.changes(cursor)) == []


async def test_a_node_that_has_left_is_gone_for_each_onlooker(console: FakeConsole, clock: FakeClock) -> None:
    cursors = [Cursor(), Cursor()]
    for cursor in cursors:
        console.state.whole(cursor)
    console.table.change([replace(node("d2"), state=NodeState.NOT_READY)], [])
    console.table.change([], ["d2"])
    await clock.advance(TICK_S)
    assert [console.state.changes(cursor)["gone"] for cursor in cursors] == [["d2"], ["d2"]]
    assert console.state.changes(cursors[0])["gone"] == []


async def test_an_onlooker_who_was_slow_gets_all_that_changed_meanwhile(console: FakeConsole, clock: FakeClock) -> None:
    slow, quick = Cursor(), Cursor()
    for cursor in (slow, quick):
        console.state.whole(cursor)
    for name in ("d1", "d2"):
        console.load(name, blocks=100)
        await clock.advance(TICK_S)
        console.state.changes(quick)
    assert ids(console.state.changes(slow)) == ["d1", "d2"]


async def test_more_turns_than_a_message_takes_are_counted(console: FakeConsole) -> None:
    cursor = Cursor()
    console.state.whole(cursor)
    for _ in range(MAX_TURNS + 7):
        console.play(warm())
    changes = console.state.changes(cursor)
    assert (len(changes["turns"]), changes["left_out"], changes["turns"][-1]["number"]) == (MAX_TURNS, 7, MAX_TURNS + 7)
    assert console.state.changes(cursor)["turns"] == []


async def test_problems_and_reasons_are_told_when_they_are_new(console: FakeConsole, clock: FakeClock) -> None:
    cursor = Cursor()
    assert "problems" in console.state.whole(cursor)["changes"]
    console.play(cold("claim:made_up"))
    changes = console.state.changes(cursor)
    assert ("problems" in changes, [*changes["reasons"]]) == (False, ["claim:made_up"])
    console.finder.follows = False
    await clock.advance(TICK_S)
    assert "no registry answers" in console.state.changes(cursor)["problems"][0]["text"]


async def test_samples_are_told_once_each(console: FakeConsole, clock: FakeClock) -> None:
    cursor = Cursor()
    console.load("d1", blocks=100, limit=500)
    console.state.sample()
    whole = console.state.whole(cursor)
    assert [sample["retained"]["blocks"] for sample in whole["samples"]] == [100]
    assert whole["nodes"] == {"p1": [0], "d1": [100], "d2": [0]}
    assert console.state.changes(cursor)["samples"] == []
    await clock.advance(STEP_S)
    console.state.sample()
    assert len(console.state.changes(cursor)["samples"]) == 1


async def test_what_is_told_holds_nothing_of_prompts_keys_or_conversations(console: FakeConsole) -> None:
    keys = keys_of(chat(SECRET), SECRET.encode())
    console.play(warm(), keys=keys)
    text = msgspec.json.encode(console.state.whole(Cursor())).decode()
    assert all(secret not in text for secret in (SECRET, *keys.find, *keys.label))


async def test_the_names_and_passwords_in_engines_urls_are_not_told(clock: FakeClock) -> None:
    console = FakeConsole(replace(node("d1"), engine_url="https://me:hunter2@d1:8200"), clock=clock)
    (row,) = console.state.whole(Cursor())["changes"]["nodes"]
    assert row["server"] == "d1:8200"
    assert "hunter2" not in str(row)


@pytest.mark.parametrize("tenants", [False, True])
async def test_tenants_are_named_where_there_are_any(clock: FakeClock, tenants: bool) -> None:
    console = FakeConsole(clock=clock, tenants=Tenants(limits={"acme": TenantLimits()}) if tenants else None)
    console.play(warm(), tenant="acme" if tenants else "")
    (turn,) = console.state.whole(Cursor())["changes"]["turns"]
    assert turn.get("tenant") == ("acme" if tenants else None)
