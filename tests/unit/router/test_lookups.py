"""Every reason for which a turn that could have reused something is cold, and the way to a warm one."""

from typing import Any

import pytest

from backhaul_common.errors import (
    AbortedError,
    BackhaulError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    UnavailableError,
)
from backhaul_connector.anchors import AnchorChain
from backhaul_router.core.engines import Failure
from backhaul_router.core.lookup import keys_of
from backhaul_router.core.nodes import NodeState
from tests.unit.router.bodies import chat
from tests.unit.router.ports import BUDGET_S, Bench, ready

PROMPT = list(range(300))


def digest(tokens: list[int]) -> bytes:
    chain = AnchorChain(b"i" * 16, 64)
    chain.extend(tokens)
    return chain.at(len(tokens))


async def test_a_turn_that_finds_its_predecessor_is_warm() -> None:
    bench = Bench()
    bench.publish("a", node_id="d2")
    done = await bench.chat("a", "b", "c")
    assert done.served == ("warm", "")
    (claim,) = bench.owner.claims
    assert (claim.address, claim.set_id, claim.engine_id) == ("agent-d2", "set", "d2-engine")
    assert claim.weights_digest == "w"
    assert claim.scope == bench.registry.lookups[0][0]
    assert bench.engines.decodes[0].node == "d2"


@pytest.mark.parametrize(
    ("failure", "miss"),
    [
        (DeadlineExceededError("X", ""), "lookup_timeout"),
        (UnavailableError("ETCD_UNAVAILABLE", ""), "registry_unavailable"),
        (InternalError("X", ""), "registry_unavailable"),
    ],
)
async def test_a_registry_that_fails_is_a_miss(failure: BackhaulError, miss: str) -> None:
    bench = Bench()
    bench.registry.failure = failure
    assert (await bench.chat("a", "b", "c")).served == ("cold", miss)


@pytest.mark.parametrize(
    ("failure", "miss"),
    [
        (NotFoundError("SET_UNKNOWN", ""), "claim:set_unknown"),
        (FailedPreconditionError("SET_CLAIMED", ""), "claim:set_claimed"),
        (AbortedError("CLAIM_RETURNED", ""), "claim:claim_returned"),
        (DeadlineExceededError("X", ""), "lookup_timeout"),
        (UnavailableError("X", ""), "owner_unavailable"),
    ],
)
async def test_an_owner_that_does_not_grant_is_a_miss(failure: BackhaulError, miss: str) -> None:
    bench = Bench()
    bench.publish("a")
    bench.owner.failure = failure
    assert (await bench.chat("a", "b", "c")).served == ("cold", miss)


@pytest.mark.parametrize(
    ("registry_s", "owner_s"),
    [
        pytest.param(60.0, 0.0, id="a registry that hangs"),
        pytest.param(0.0, 60.0, id="an owner that hangs"),
        pytest.param(BUDGET_S - 0.02, 60.0, id="a slow registry and an owner that hangs"),
    ],
)
async def test_whoever_hangs_costs_no_more_than_the_budget(registry_s: float, owner_s: float) -> None:
    bench = Bench()
    bench.publish("a")
    bench.registry.takes_s, bench.owner.takes_s = registry_s, owner_s
    before = bench.clock.now
    assert (await bench.chat("a", "b", "c")).served == ("cold", "lookup_timeout")
    assert bench.clock.now - before == pytest.approx(BUDGET_S)


async def test_every_claim_has_an_id_of_its_own() -> None:
    """An owner takes an equal one for the same claim, asked for again: two turns would read the same set."""
    bench = Bench()
    bench.publish("a")
    await bench.chat("a", "b", "c")
    await bench.chat("a", "b", "d")
    first, second = bench.owner.claims
    assert first.set_id == second.set_id
    assert first.request_id != second.request_id


async def test_a_handle_that_is_no_object_is_given_back() -> None:
    bench = Bench()
    bench.publish("a")
    bench.owner.handle = "7"
    assert (await bench.chat("a", "b", "c")).served == ("cold", "claim:bad_handle")
    assert len(bench.owner.returned) == 1


async def test_nothing_found_is_a_miss_and_for_a_first_turn_no_surprise() -> None:
    bench = Bench()
    assert (await bench.chat("a", "b", "c")).served == ("cold", "not_found")
    assert (await bench.chat("a", session_id="s1")).served == ("cold", "first_turn")
    assert len(bench.registry.lookups) == 2
    assert (await bench.chat("a")).served == ("cold", "first_turn")
    assert len(bench.registry.lookups) == 2


@pytest.mark.parametrize(
    ("nodes", "pointer", "miss"),
    [
        pytest.param(ready("p1", "d1"), {"node_id": "d9"}, "owner_unavailable", id="node not listed"),
        pytest.param(ready("p1", "d1"), {"engine_id": "old"}, "owner_unavailable", id="engine restarted"),
        pytest.param(
            [*ready("p1", "d2"), *ready("d1", state=NodeState.NOT_READY)], {}, "owner_unavailable", id="not ready"
        ),
        pytest.param(
            [*ready("p1", "d2"), *ready("d1", state=NodeState.DRAINING)], {}, "owner_unavailable", id="draining"
        ),
        pytest.param([*ready("p1", "d2"), *ready("d1", hash="x")], {}, "incompatible", id="another build"),
        pytest.param([*ready("p1", "d2"), *ready("d1", weights="x")], {}, "incompatible", id="other weights"),
        pytest.param([*ready("p1", connector=""), *ready("d1")], {}, "no_connector", id="stock prefill engine"),
    ],
)
async def test_a_set_that_nobody_can_read_is_not_claimed(nodes: Any, pointer: dict[str, Any], miss: str) -> None:
    bench = Bench(nodes=nodes)
    bench.publish("a", **pointer)
    assert (await bench.chat("a", "b", "c")).served == ("cold", miss)
    assert bench.owner.claims == []


async def test_of_several_sets_the_longest_that_fits_the_prompt_is_claimed() -> None:
    bench = Bench()
    bench.engines.tokens = PROMPT
    bench.publish("a", set_id="short", token_count=64, digest=digest(PROMPT[:64]))
    bench.publish("a", "b", "c", set_id="fork", token_count=256, digest=digest([7, *PROMPT[1:256]]))
    bench.publish("a", "b", "c", set_id="long", token_count=200, digest=digest(PROMPT[:200]))
    assert (await bench.chat("a", "b", "c", "d", "e")).served == ("warm", "")
    assert [claim.set_id for claim in bench.owner.claims] == ["long"]


async def test_several_sets_of_which_none_fits_are_left_alone() -> None:
    bench = Bench()
    bench.engines.tokens = PROMPT
    bench.publish("a", set_id="one", digest=digest([9] * 128))
    bench.publish("a", set_id="two", digest=digest([8] * 128))
    assert (await bench.chat("a", "b", "c")).served == ("cold", "no_match")
    assert bench.owner.claims == []


@pytest.mark.parametrize("tokens", [Failure.TIMEOUT, Failure.REFUSED, []])
async def test_several_sets_without_the_prompts_tokens_are_ambiguous(tokens: Any) -> None:
    bench = Bench()
    bench.engines.tokens = tokens
    bench.publish("a", set_id="one")
    bench.publish("a", set_id="two")
    assert (await bench.chat("a", "b", "c")).served == ("cold", "ambiguous")


async def test_one_set_under_two_keys_needs_no_tokens() -> None:
    bench = Bench()
    bench.publish("a")
    session = keys_of(chat("a", model="m"), b"s1").find[0]
    pointer = bench.registry.pointers[0]
    bench.registry.pointers.append(type(pointer)(session, *(getattr(pointer, name) for name in pointer.__slots__[1:])))
    assert (await bench.chat("a", "b", "c", session_id="s1")).served == ("warm", "")


async def test_the_turn_after_waits_for_the_publish() -> None:
    bench = Bench()
    await bench.chat("a")
    bench.clock.on_sleep = lambda: bench.publish("a") if len(bench.registry.lookups) == 2 else None
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")
    assert len(bench.registry.lookups) == 3


async def test_the_wait_for_a_publish_ends_within_the_budget_and_happens_once() -> None:
    bench = Bench()
    await bench.chat("a")
    before = bench.clock.now
    assert (await bench.chat("a", "b", "c")).served == ("cold", "not_found")
    assert 0 < bench.clock.now - before < BUDGET_S
    before = bench.clock.now
    await bench.chat("a", "b", "c")
    assert bench.clock.now == before


@pytest.mark.parametrize("failure", [None, UnavailableError("X", "")])
async def test_what_was_found_is_claimed_when_the_registry_fails_while_more_is_waited_for(
    failure: BackhaulError | None,
) -> None:
    bench = Bench()
    bench.publish("a", set_id="old")
    await bench.chat("a", "b", "c")

    def fail() -> None:
        bench.registry.takes_s, bench.registry.failure = 60.0, failure

    bench.clock.on_sleep = fail
    before = bench.clock.now
    assert (await bench.chat("a", "b", "c", "d", "e")).served == ("warm", "")
    assert [claim.set_id for claim in bench.owner.claims] == ["old", "old"]
    assert bench.clock.now - before <= BUDGET_S


async def test_an_older_set_is_not_taken_while_the_newer_one_is_on_its_way() -> None:
    bench = Bench()
    bench.publish("a", set_id="old")
    await bench.chat("a", "b", "c")
    assert [claim.set_id for claim in bench.owner.claims] == ["old"]
    bench.clock.on_sleep = lambda: bench.publish("a", "b", "c", set_id="new")
    bench.registry.pointers.clear()
    await bench.chat("a", "b", "c", "d", "e")
    assert [claim.set_id for claim in bench.owner.claims] == ["old", "new"]


@pytest.mark.parametrize("session_id", [None, "s1"], ids=["", "with a session"])
async def test_a_set_that_the_newer_one_superseded_is_not_waited_for(session_id: str | None) -> None:
    bench = Bench()
    await bench.chat("a", session_id=session_id)
    bench.publish("a", set_id="old")
    await bench.chat("a", "b", "c", session_id=session_id)
    bench.registry.pointers.clear()
    bench.publish("a", "b", "c", set_id="new")
    before = bench.clock.now
    assert (await bench.chat("a", "b", "c", "d", "e", session_id=session_id)).served == ("warm", "")
    assert bench.clock.now == before


async def test_nothing_is_expected_of_a_turn_that_broke() -> None:
    bench = Bench()
    with pytest.raises(ConnectionResetError):
        await bench.leave("a")
    before = bench.clock.now
    await bench.chat("a", "b", "c")
    assert bench.clock.now == before


async def test_nothing_is_expected_of_a_stock_decode_engine() -> None:
    bench = Bench(nodes=[*ready("p1"), *ready("d1", connector="")])
    await bench.chat("a")
    before = bench.clock.now
    await bench.chat("a", "b", "c")
    assert bench.clock.now == before
