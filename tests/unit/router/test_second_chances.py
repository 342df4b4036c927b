"""Turns with nothing to claim whose blocks may still be cached: the way to warm, and every reason for cold."""

from dataclasses import replace
from typing import Any

import pytest

from backhaul_common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from backhaul_connector.anchors import AnchorChain
from backhaul_router.core.body import Endpoint
from backhaul_router.core.claims import KeptBlocks
from backhaul_router.core.engines import Failure
from backhaul_router.core.lookup import session_key
from backhaul_router.core.nodes import Node, NodeState
from backhaul_router.ports import Policy, TurnRequest
from tests.unit.router.ports import BUDGET_S, HARVEST_BUDGET_S, Bench, fault, hand_off, ready, warm_hand_off

PROMPT = list(range(300))
KEPT = KeptBlocks("agent-d1", "d1-engine", "fresh")
IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]


def nodes(*, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> list[Node]:
    return [*ready("p1", **(prefill or {})), *ready("d1", "d2", **{"second_chance": True, **(decode or {})})]


def cached_bench(
    *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **options: Any
) -> Bench:
    """A bench of which d1 may still cache what the turn ``a`` left."""
    bench = Bench(nodes=nodes(prefill=prefill, decode=decode), **options)
    bench.engines.tokens = PROMPT
    publish(bench)
    return bench


def publish(bench: Bench, *contents: str, **fields: Any) -> None:
    unsaid = {"token_count": 0, "digest": b"", "stride": 0, "identity": b""}
    bench.publish(*contents or ("a",), cached=True, **{"set_id": "cached-set", **unsaid, **fields})


def publish_session(bench: Bench) -> None:
    """Publishes what the session ``s`` left, and nothing else."""
    bench.registry.pointers.clear()
    publish(bench)
    bench.registry.pointers = [replace(pointer, key=session_key(b"s")) for pointer in bench.registry.pointers]


async def test_a_turn_with_nothing_to_claim_reads_what_is_still_cached() -> None:
    bench = cached_bench()
    done = await bench.chat("a", "b", "c")
    assert done.served == ("warm", "")
    assert done.answer.headers["x-backhaul-source"] == "cached"
    (asked,) = bench.owner.harvests
    assert (asked.address, asked.set_id, asked.engine_id) == ("agent-d1", "cached-set", "d1-engine")
    assert (asked.weights_digest, asked.model, asked.cache_salt) == ("w", "m", "")
    assert (asked.token_ids, asked.scope) == (PROMPT, bench.registry.lookups[0][0])
    assert bench.engines.decodes[-1].node == "d1"
    assert bench.engines.prefills[-1].body["kv_transfer_params"]["backhaul"] == {"token_count": 128}
    assert (bench.owner.claims, bench.owner.released) == ([], [])


async def test_the_salt_of_the_legs_is_that_of_the_handle() -> None:
    bench = Bench(nodes=nodes())
    bench.engines.tokens = PROMPT
    await bench.chat("a", session_id="s", cache_salt="salt")
    publish_session(bench)
    assert (await bench.chat("a", "b", "c", session_id="s", cache_salt="salt")).served == ("warm", "")
    assert bench.owner.harvests[0].cache_salt == bench.engines.prefills[-1].body["cache_salt"] == "salt"


async def test_what_is_retained_comes_before_what_is_cached() -> None:
    bench = cached_bench()
    bench.publish("a")
    done = await bench.chat("a", "b", "c")
    assert done.served == ("warm", "")
    assert done.answer.headers["x-backhaul-source"] == "claimed"
    assert len(bench.owner.claims) == 1
    assert (bench.owner.harvests, bench.engines.tokenized) == ([], [])


@pytest.mark.parametrize(
    "refusal",
    [
        NotFoundError("SET_UNKNOWN", ""),
        FailedPreconditionError("SET_EXPIRING", ""),
        FailedPreconditionError("SET_CLAIMED", ""),
        FailedPreconditionError("SET_FENCED", ""),
        FailedPreconditionError("DRAINING", ""),
    ],
    ids=lambda refusal: refusal.reason,
)
async def test_a_refused_claim_gets_a_second_chance(refusal: Any) -> None:
    bench = cached_bench()
    bench.publish("a")
    bench.owner.failure = refusal
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")


@pytest.mark.parametrize(
    "failure", [FailedPreconditionError("WEIGHTS_MISMATCH", ""), DeadlineExceededError("X", "")], ids=lambda e: e.reason
)
async def test_an_owner_that_would_refuse_again_or_is_silent_is_not_asked_again(failure: Any) -> None:
    bench = cached_bench()
    bench.publish("a")
    bench.owner.failure = failure
    assert (await bench.chat("a", "b", "c")).served[0] == "cold"
    assert bench.owner.harvests == []


@pytest.mark.parametrize(
    ("failure", "miss"),
    [
        (NotFoundError("NOT_CACHED", ""), "harvest:not_cached"),
        (ResourceExhaustedError("BACKED_OFF", ""), "harvest:backed_off"),
        (UnavailableError("ENGINE_FAILED", ""), "harvest:engine_failed"),
        (DeadlineExceededError("DEADLINE_EXCEEDED", ""), "harvest_timeout"),
    ],
)
async def test_an_owner_that_gives_no_handle_is_a_miss(failure: Any, miss: str) -> None:
    bench = cached_bench()
    bench.owner.harvest_failures = [failure]
    assert (await bench.chat("a", "b", "c")).served == ("cold", miss)
    assert len(bench.owner.harvests) == 1


async def test_at_most_two_owners_are_asked_the_best_key_first() -> None:
    bench = cached_bench()
    publish(bench, "a", "b", "c", set_id="cached-newer", node_id="d2")
    publish(bench, set_id="cached-third", node_id="d2")
    bench.owner.harvest_failures = [NotFoundError("NOT_CACHED", ""), NotFoundError("NOT_CACHED", "")]
    assert (await bench.chat("a", "b", "c", "d", "e")).served == ("cold", "harvest:not_cached")
    assert [asked.set_id for asked in bench.owner.harvests] == ["cached-newer", "cached-set"]
    bench.owner.harvest_failures = [NotFoundError("NOT_CACHED", "")]
    assert (await bench.chat("a", "b", "c", "d", "e")).served == ("warm", "")
    assert bench.engines.decodes[-1].node == "d1"


def digest_of(tokens: list[int]) -> dict[str, Any]:
    chain = AnchorChain(b"i" * 16, 64)
    chain.extend(tokens)
    return {"token_count": len(tokens), "digest": chain.at(len(tokens)), "stride": 64, "identity": b"i" * 16}


async def test_what_leads_to_the_prompts_own_tokens_is_asked_for_before_other_requests_of_the_session() -> None:
    bench = Bench(nodes=nodes())
    bench.engines.tokens = PROMPT
    for number in range(3):
        publish(bench, set_id=f"cached-title-{number}", **digest_of([7] * 100))
    publish(bench, set_id="cached-turn", **digest_of(PROMPT[:200]))
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")
    assert [asked.set_id for asked in bench.owner.harvests] == ["cached-turn"]


async def test_an_owner_that_hangs_costs_the_budget_for_second_chances() -> None:
    bench = cached_bench()
    publish(bench, set_id="cached-other", node_id="d2")
    bench.owner.harvest_takes_s = 60.0
    before = bench.clock.now
    assert (await bench.chat("a", "b", "c")).served == ("cold", "harvest_timeout")
    assert bench.clock.now - before == pytest.approx(HARVEST_BUDGET_S)
    assert len(bench.owner.harvests) == 1


async def test_a_registry_that_was_slow_leaves_the_budget_whole() -> None:
    bench = cached_bench()
    bench.registry.takes_s = BUDGET_S - 0.01
    bench.owner.harvest_takes_s = HARVEST_BUDGET_S - 0.01
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")


@pytest.mark.parametrize("tokens", [Failure.TIMEOUT, [], [1, 2**31], [-1]], ids=str)
async def test_without_the_prompts_tokens_nobody_is_asked(tokens: Any) -> None:
    bench = cached_bench()
    bench.engines.tokens = tokens
    assert (await bench.chat("a", "b", "c")).served == ("cold", "no_tokens")
    assert bench.owner.harvests == []


async def test_a_prompt_given_as_tokens_needs_no_engine_to_say_them() -> None:
    bench = cached_bench()
    publish_session(bench)
    body = b'{"model":"m","prompt":[7,8,9]}'
    request = TurnRequest(Endpoint.COMPLETIONS, body, tenant="", session_id="s")
    assert (await bench.run(request)).served == ("warm", "")
    assert bench.owner.harvests[0].token_ids == [7, 8, 9]
    assert bench.engines.tokenized == []


@pytest.mark.parametrize(
    ("options", "contents"),
    [
        pytest.param({"harvest_budget_s": 0.0}, ["a", "b", "c"], id="switched off"),
        pytest.param({"decode": {"second_chance": False}}, ["a", "b", "c"], id="owner that does not follow events"),
        pytest.param({"decode": {"state": NodeState.DRAINING}}, ["a", "b", "c"], id="draining"),
        pytest.param({"decode": {"weights": "x"}}, ["a", "b", "c"], id="other weights"),
        pytest.param({"prefill": {"connector": "", "weights": ""}}, ["a", "b", "c"], id="stock, weights unknown"),
        pytest.param({}, ["a", "b", IMAGE], id="an image in the prompt"),
    ],
)
async def test_what_cannot_be_read_or_named_by_its_tokens_is_not_asked_for(
    options: dict[str, Any], contents: list[Any]
) -> None:
    bench = cached_bench(**options)
    assert (await bench.chat(*contents)).served == ("cold", "not_found")
    assert (bench.owner.harvests, bench.engines.tokenized) == ([], [])


async def test_text_in_parts_is_text() -> None:
    bench = cached_bench()
    parts: Any = [{"type": "text", "text": "c"}]
    assert (await bench.chat("a", "b", parts)).served == ("warm", "")


@pytest.mark.parametrize("handle", ["7", "not json"])
async def test_a_handle_that_is_no_object_is_released(handle: str) -> None:
    bench = cached_bench()
    bench.owner.handle = handle
    assert (await bench.chat("a", "b", "c")).served == ("cold", "harvest:bad_handle")
    assert bench.owner.released == [KEPT]


async def test_a_fresh_handle_that_was_not_spent_is_released() -> None:
    bench = cached_bench()
    bench.engines.prefill_steps = [hand_off(refused="too_few_tokens")]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "refused:too_few_tokens")
    assert bench.owner.released == [KEPT]
    bench.engines.prefill_steps = [warm_hand_off()]
    await bench.chat("a", "b", "c")
    assert bench.owner.released == [KEPT]


async def test_a_fresh_handle_that_reached_no_engine_is_released() -> None:
    bench = cached_bench()
    bench.engines.prefill_steps = [Failure.REFUSED]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "prefill_failed")
    assert bench.owner.released == [KEPT]


# A prefill engine without the connector

STOCK = {"connector": ""}


def stock_hand_off() -> Any:
    """What a prefill engine without the connector answers."""
    reply = hand_off()
    return type(reply)(200, {}, b'{"kv_transfer_params":{"remote_engine_id":"pe"},"usage":{"prompt_tokens":300}}')


async def test_a_prefill_engine_without_the_connector_is_given_the_prompts_very_tokens() -> None:
    bench = cached_bench(prefill=STOCK)
    bench.engines.prefill_steps = [stock_hand_off()]
    done = await bench.chat("a", "b", "c", priority=3, temperature=0.5, max_tokens=9)
    assert done.served == ("warm", "")
    leg = bench.engines.prefills[-1]
    assert leg.path == "/v1/completions"
    handle = {"remote_block_ids": [[1]], "backhaul": {"token_count": 128}}
    assert leg.body == {"model": "m", "priority": 3, "prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": handle}
    decode = bench.engines.decodes[-1]
    assert (decode.node, decode.path, decode.body["max_tokens"]) == ("d1", "/v1/chat/completions", 9)
    assert decode.body["kv_transfer_params"]["remote_engine_id"] == "pe"
    assert (done.answer.outcome.prompt_token_count, done.answer.outcome.read_token_count) == (300, 256)


async def test_one_with_the_connector_is_preferred() -> None:
    bench = Bench(nodes=[*ready("p1", connector=""), *ready("p2"), *ready("d1", second_chance=True)])
    bench.engines.tokens = PROMPT
    publish(bench)
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")
    assert (bench.engines.prefills[-1].node, bench.engines.prefills[-1].path) == ("p2", "/v1/chat/completions")


async def test_a_claimed_handle_never_goes_to_an_engine_without_the_connector() -> None:
    bench = Bench(nodes=nodes(prefill=STOCK))
    bench.engines.tokens = PROMPT
    bench.publish("a")
    assert (await bench.chat("a", "b", "c")).served == ("cold", "no_connector")
    assert bench.owner.claims == []
    publish(bench)
    bench.engines.prefill_steps = [stock_hand_off()]
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")
    assert bench.owner.claims == []


@pytest.mark.parametrize("covered", [300, 301, 0])
async def test_a_handle_that_is_not_shorter_than_the_prompt_is_released(covered: int) -> None:
    bench = cached_bench(prefill=STOCK)
    bench.owner.harvested_tokens = covered
    assert (await bench.chat("a", "b", "c")).served == ("cold", "harvest:bad_handle")
    assert bench.owner.released == [KEPT]


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate_prompt_tokens": 100},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
    ],
)
async def test_no_tokens_are_sent_of_which_it_is_not_certain_that_they_are_the_prompts(fields: dict[str, Any]) -> None:
    bench = Bench(nodes=nodes(prefill=STOCK))
    bench.engines.tokens = PROMPT
    await bench.chat("a", session_id="s", **fields)
    publish_session(bench)
    assert (await bench.chat("a", "b", "c", session_id="s", **fields)).served[0] == "cold"
    assert bench.owner.harvests == []


async def test_nor_of_a_model_that_sees_more_than_a_tokenizer_does() -> None:
    bench = cached_bench(prefill=STOCK, policy=Policy(keep_constraints=("m",)))
    assert (await bench.chat("a", "b", "c")).served == ("cold", "not_found")


async def test_an_engine_that_refuses_the_tokens_gets_the_clients_request() -> None:
    bench = cached_bench(prefill=STOCK)
    bench.engines.prefill_steps = [fault(404)]
    assert (await bench.chat("a", "b", "c")).served == ("cold", "prefill_failed")
    assert [leg.path for leg in bench.engines.prefills] == ["/v1/completions", "/v1/chat/completions"]


# A decode engine without the connector


async def test_a_decode_engine_without_the_connector_is_told_the_turns_keys_as_its_session() -> None:
    bench = Bench(nodes=nodes(decode=STOCK))
    await bench.chat("a", session_id="mine")
    scope, (key,) = bench.registry.lookups[0]
    label = bench.engines.decodes[0].body["session_id"]
    assert label.startswith(f"backhaul:{scope}:{key}:")
    assert bench.engines.decodes[0].body["kv_transfer_params"]["backhaul"]["keys"] == label.split(":")[2:]
    assert "session_id" not in bench.engines.prefills[0].body
    bench.registry.pointers.clear()
    publish(bench)
    bench.engines.tokens = PROMPT
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")


@pytest.mark.parametrize("decode", [{}, {"connector": "", "second_chance": False}])
async def test_no_other_decode_engine_is_told_a_session(decode: dict[str, Any]) -> None:
    bench = Bench(nodes=nodes(decode=decode))
    await bench.chat("a", session_id="mine")
    assert "session_id" not in bench.engines.decodes[0].body


async def test_a_turn_that_must_not_be_kept_has_no_session() -> None:
    bench = Bench(nodes=nodes(decode=STOCK))
    await bench.chat("a", reuse=False)
    assert "session_id" not in bench.engines.decodes[0].body
