"""What the console tells of one conversation."""

import pytest

from backhaul_common.errors import UnavailableError
from backhaul_router.console.conversations import Question
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.claims import HeldSet
from backhaul_router.core.errors import ApiError
from backhaul_router.core.lookup import TurnKeys, keys_of, scope_of, session_key
from backhaul_router.core.nodes import Role
from backhaul_router.core.queueing import TenantLimits
from backhaul_router.core.tenants import Tenants
from tests.fakes.clock import FakeClock
from tests.fakes.console import MODEL, FakeConsole, cold, node, warm
from tests.unit.router.bodies import chat

SESSION = session_key(b"session-1")


def console(*, tenants: Tenants | None = None) -> FakeConsole:
    return FakeConsole(node("p1", Role.PREFILL), node("d1"), clock=FakeClock(), tenants=tenants)


def pointer(set_id: str, *, key: str = SESSION, node_id: str = "d1", cached: bool = False) -> Pointer:
    return Pointer(key, set_id, f"{node_id}-engine", node_id, 128, b"", 64, b"", cached)


def keys(*contents: str, session: bytes | None = None) -> TurnKeys:
    return keys_of(chat(*contents), session)


async def test_a_conversation_has_its_turns_and_what_its_owner_says_of_its_sets() -> None:
    shown = console()
    shown.play(cold(), keys=keys("a", session=b"session-1"))
    shown.play(warm(), keys=keys("a", session=b"session-2"))
    shown.finder.pointers = [pointer("set-1")]
    shown.finder.held = [HeldSet("set-1", "d1-engine", "held", 130, 9, 44.04)]
    document = await shown.reader.by_id(Question("session-1"))
    assert [turn["number"] for turn in document["turns"]] == [1]
    held = {"id": "set-1", "node": "d1", "engine": "d1-engine", "state": "held", "tokens": 130, "blocks": 9}
    assert document["sets"] == [held | {"remaining_s": 44.0}]


async def test_a_conversation_that_this_router_does_not_remember_is_looked_up_for_every_model() -> None:
    shown = console()
    shown.finder.pointers = [pointer("set-1")]
    assert (await shown.reader.by_id(Question("session-1")))["sets"]
    assert shown.finder.lookups == [(scope_of(model=MODEL, cache_salt="", tenant=""), (SESSION,))]
    await shown.reader.by_id(Question("session-1", model="other", cache_salt="salt"))
    assert shown.finder.lookups[-1] == (scope_of(model="other", cache_salt="salt", tenant=""), (SESSION,))


async def test_a_turn_leads_to_its_conversation_and_to_what_the_next_one_finds() -> None:
    shown = console()
    first, second = keys("a"), keys("a", "b", "c")
    shown.play(cold(), keys=first)
    number = shown.play(warm(), keys=second)
    shown.finder.pointers = [pointer("set-2", key=second.own)]
    document = await shown.reader.of_turn(number)
    assert [turn["number"] for turn in document["turns"]] == [1, 2]
    assert [one["id"] for one in document["sets"]] == ["set-2"]
    assert shown.finder.lookups == [("scope", (second.own, first.own))]


@pytest.mark.parametrize(
    ("cached", "silent", "state"), [(True, False, "cached"), (False, False, "gone"), (False, True, "unknown")]
)
async def test_a_set_that_its_owner_does_not_list_is_not_said_to_be_held(
    cached: bool, silent: bool, state: str
) -> None:
    shown = console()
    shown.finder.pointers = [pointer("set-1", cached=cached)]
    shown.finder.silent = UnavailableError("AWAY", "away") if silent else None
    document = await shown.reader.by_id(Question("session-1"))
    assert [one["state"] for one in document["sets"]] == [state]
    assert bool(document["problems"]) is silent


async def test_a_set_of_a_node_that_has_left_is_told_with_the_reason() -> None:
    shown = console()
    shown.finder.pointers = [pointer("set-1", node_id="d9")]
    document = await shown.reader.by_id(Question("session-1"))
    assert (document["sets"][0]["state"], "d9 is not listed" in document["problems"][0]) == ("unknown", True)


async def test_a_registry_that_does_not_answer_leaves_the_history() -> None:
    shown = console()
    shown.play(cold(), keys=keys("a", session=b"session-1"))
    shown.finder.failure = UnavailableError("AWAY", "away")
    document = await shown.reader.by_id(Question("session-1"))
    assert (len(document["turns"]), document["sets"], len(document["problems"])) == (1, [], 1)


async def test_with_tenants_only_the_named_ones_or_remembered_turns_are_looked_in() -> None:
    shown = console(tenants=Tenants(limits={"acme": TenantLimits(), "other": TenantLimits()}))
    await shown.reader.by_id(Question("session-1"))
    assert shown.finder.lookups == []
    await shown.reader.by_id(Question("session-1", tenant="acme"))
    assert [scope for scope, _ in shown.finder.lookups] == [shown.scopes.scope("acme", model=MODEL, client_salt="")]
    shown.play(cold(), keys=keys("a", session=b"session-1"), tenant="acme", scope="acme's")
    assert (await shown.reader.by_id(Question("session-1", tenant="other")))["turns"] == []
    assert (await shown.reader.by_id(Question("session-1")))["turns"]
    assert shown.finder.lookups[-1] == ("acme's", (SESSION,))


@pytest.mark.parametrize("session_id", ["", "x" * 513])
async def test_what_cannot_be_an_id_is_refused(session_id: str) -> None:
    with pytest.raises(ApiError) as caught:
        await console().reader.by_id(Question(session_id))
    assert caught.value.status == 400


async def test_a_turn_that_is_not_remembered_is_not_found() -> None:
    with pytest.raises(ApiError) as caught:
        await console().reader.of_turn(1)
    assert caught.value.status == 404
