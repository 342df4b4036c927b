"""Turns whose blocks are merely cached, over real sockets: with and without the connector on either side."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from backhaul_router.core.lookup import scope_of
from tests.fakes.engine import FakeEngine
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, MODEL, RouterStack, router_stack
from tests.integration.test_router_turns import label_key

BUDGET_S = 1.0


@asynccontextmanager
async def chances(*, prefill: bool = True, decode: bool = True, **config: Any) -> AsyncIterator[RouterStack]:
    """A stack whose decode engine gives second chances, each side with the connector or without."""
    engines = {"prefill": FakeEngine("prefill", connector=prefill), "decode": FakeEngine("decode", connector=decode)}
    async with router_stack(listed=False, **{**engines, "harvest_budget_s": 5.0, **config}) as stack:
        await stack.directory.add(stack.prefill, agent=stack.owner.address)
        await stack.directory.add(stack.decode, agent=stack.owner.address, second_chance=True)
        await eventually(lambda: len(stack.router.table) == 2)
        stack.owner.cached_count = 128
        yield stack


def publish(stack: RouterStack, key: str = "") -> None:
    """Publishes that what the turn ``hi`` left may still be cached."""
    unsaid: dict[str, Any] = {"token_count": 0, "digest": b"", "stride": 0, "identity": b""}
    stack.publish(key or label_key("hi"), "cached-1", cached=True, **unsaid)


async def test_a_turn_reads_what_is_still_cached_and_says_so() -> None:
    async with chances() as stack:
        publish(stack)
        got = await stack.chat("hi", "hello", "more", stream=True, cache_salt="salt")
    assert (got.status, got.route, got.miss) == (200, "warm", "")
    assert got.headers["x-backhaul-source"] == "cached"
    (asked,) = stack.owner.harvests
    assert list(asked.token_ids) == stack.prefill.tokens
    assert (asked.set_id, asked.engine_id, asked.model) == ("cached-1", stack.decode.engine_id, MODEL)
    assert (asked.weights_digest, asked.cache_salt) == ("weights", "salt")
    assert asked.scope == scope_of(model=MODEL, cache_salt="salt", tenant="")
    (prefill,) = stack.prefill.legs
    assert prefill.params is not None
    assert prefill.params["remote_request_id"] == "fresh-1"
    await stack.told()
    assert stack.owner.released == []


async def test_without_the_connector_on_either_side_the_prompts_tokens_are_sent() -> None:
    async with chances(prefill=False, decode=False) as stack:
        got = await stack.chat("hi", stream=True, session_id="mine")
        (first,) = stack.decode.legs
        name, scope, *keys = first.body["session_id"].split(":")
        assert (name, scope, keys[-1]) == ("backhaul", scope_of(model=MODEL, cache_salt="", tenant=""), label_key("hi"))
        publish(stack, keys[0])
        got = await stack.chat("hi", "hello", "more", stream=True, session_id="mine")
    assert (got.status, got.route, got.miss) == (200, "warm", "")
    assert got.headers["x-backhaul-read-tokens"] == "128"
    leg, decode = stack.prefill.legs[-1], stack.decode.legs[-1]
    assert (leg.path, leg.body["prompt"], leg.body["max_tokens"]) == ("/v1/completions", stack.prefill.tokens, 1)
    assert decode.path == CHAT
    assert decode.params is not None
    assert decode.params["remote_engine_id"] == stack.prefill.engine_id
    assert "mine" not in str([leg.body for leg in stack.prefill.legs + stack.decode.legs])


async def test_what_is_cached_no_more_and_a_silent_owner_cost_a_cold_turn_and_little_time() -> None:
    async with chances(harvest_budget_s=BUDGET_S) as stack:
        publish(stack)
        stack.owner.cached_count = 0
        got = await stack.chat("hi", "hello", "more")
        assert (got.status, got.route, got.miss) == (200, "cold", "harvest:not_cached")
        stack.owner.silent = True
        began = time.monotonic()
        got = await stack.chat("hi", "hello", "more")
        assert (got.status, got.route, got.miss) == (200, "cold", "harvest_timeout")
        assert time.monotonic() - began > BUDGET_S
        await eventually(lambda: stack.owner.harvests_left == 1)


async def test_a_tokenizer_that_hangs_costs_the_same() -> None:
    async with chances(harvest_budget_s=BUDGET_S) as stack:
        publish(stack)
        stack.prefill.tokenize_hangs = True
        got = await stack.chat("hi", "hello", "more")
        assert (got.status, got.route, got.miss) == (200, "cold", "no_tokens")
    assert stack.owner.harvests == []
