"""Turns that the holder of a conversation goes on with by itself: what they leave behind, and what may befall them."""

import json
import random
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from backhaul_local.engines import BLOCK_SIZE, MODEL_NAME
from tests.e2e.routing.conftest import BLOCKS, BUT_ONE_REAL, ONE_DECODE, SOON_S, TOKENS, Holders, script
from tests.e2e.stack.chat import Chat, answered
from tests.e2e.stack.conftest import eventually
from tests.fakes.engine_pair import COLD, Engine

pytestmark = pytest.mark.timeout(400)

QUESTION = "And what came next?"
VOCABULARY = range(300, 1000)
"""Token ids that the simulated and the tiny model have."""


def test_an_appended_turn_takes_the_place_of_the_one_before_and_can_be_read_by_a_prefill_engine(
    chats: dict[str, Chat], holders: Holders
) -> None:
    salt = uuid.uuid4().hex
    first, second, third = script(chats["cold"], [QUESTION] * 2)
    chats["append"].send(first.messages, cache_salt=salt, tokens=TOKENS)
    older = holders.one_set(salt)

    appended = chats["append"].send(second.messages, cache_salt=salt, tokens=TOKENS)

    assert (appended.route, appended.text) == ("append", second.text)
    newer = holders.one_set(salt, older)
    assert newer.node == older.node
    assert newer.block_set.token_count > older.block_set.token_count + TOKENS
    eventually(lambda: holders[newer.node].used() == newer.block_set.block_count, within_s=SOON_S)
    eventually(lambda: holders[newer.node].pointers(older.block_set) == 0, within_s=SOON_S)
    read = chats["warm"].send(third.messages, cache_salt=salt, tokens=TOKENS)
    assert (read.route, read.miss, read.text) == ("warm", "", third.text)
    assert newer.block_set.token_count - BLOCK_SIZE < read.local + read.read
    # Of the turn in between no prefill engine has computed anything.
    assert read.read > newer.block_set.token_count - older.block_set.token_count


@pytest.mark.parametrize("kind", BUT_ONE_REAL, indirect=True)
def test_an_appended_turn_that_ends_by_a_stop_token_can_be_read_and_continued(
    chats: dict[str, Chat], holders: Holders, engines: Mapping[str, Engine]
) -> None:
    salt = uuid.uuid4().hex
    first, second = script(chats["cold"], [QUESTION])
    chats["append"].send(first.messages, cache_salt=salt, tokens=TOKENS)
    older = holders.one_set(salt)
    body = {"prompt": second.text, "model": MODEL_NAME, "add_special_tokens": False}
    stop = engines[older.node].http.post("/tokenize", json=body).json()["tokens"][TOKENS // 2]
    more: dict[str, Any] = {"stop_token_ids": [stop], "min_tokens": 0}
    right = chats["cold"].cold(second.messages, tokens=TOKENS, **more)

    appended = chats["append"].send(second.messages, cache_salt=salt, tokens=TOKENS, **more)

    assert (appended.route, appended.text) == ("append", right)
    assert len(right) < len(second.text)
    holders.one_set(salt, older)
    messages = answered(second.messages, right)
    read = chats["warm"].send(messages, cache_salt=salt, tokens=TOKENS)
    assert (read.route, read.text) == ("warm", chats["cold"].cold(messages, tokens=TOKENS))
    messages = answered(messages, read.text)
    continued = chats["append"].send(messages, cache_salt=salt, tokens=TOKENS)
    assert (continued.route, continued.text) == ("append", chats["cold"].cold(messages, tokens=TOKENS))


@pytest.mark.parametrize("kind", BUT_ONE_REAL, indirect=True)
def test_a_turn_that_is_sent_again_after_it_was_appended_is_right_and_no_node_holds_it_twice(
    chats: dict[str, Chat], holders: Holders
) -> None:
    salt = uuid.uuid4().hex
    first, second, third = script(chats["cold"], [QUESTION] * 2)
    chats["append"].send(first.messages, cache_salt=salt, tokens=TOKENS)
    older = holders.one_set(salt)
    appended = chats["append"].send(second.messages, cache_salt=salt, tokens=TOKENS)
    newer = holders.one_set(salt, older)

    again = chats["append"].send(second.messages, cache_salt=salt, tokens=TOKENS)

    assert (appended.route, appended.text, again.text) == ("append", second.text, second.text)
    # What it continues has gone: it may have been computed by the other node.
    holders.settle(salt)
    last = chats["append"].send(third.messages, cache_salt=salt, tokens=TOKENS)
    assert (last.route, last.text) == ("append", third.text), newer


def test_a_client_that_leaves_in_the_middle_leaves_nothing_pinned_and_its_next_turn_is_appended(
    chats: dict[str, Chat], holders: Holders
) -> None:
    salt = uuid.uuid4().hex
    first, second = script(chats["cold"], [QUESTION])
    chats["append"].send(first.messages, cache_salt=salt, tokens=TOKENS)
    held = holders.one_set(salt)
    owner = holders[held.node]
    body = {"model": MODEL_NAME, "messages": second.messages, "temperature": 0, "stream": True, "cache_salt": salt}
    length = {"max_tokens": 2000, "min_tokens": 2000}

    with chats["append"].http.stream("POST", "/v1/chat/completions", json={**body, **length}) as answer:
        assert answer.headers["x-backhaul-route"] == "append"
        texts = (line for line in answer.iter_lines() if line.startswith("data: "))
        said = [json.loads(next(texts)[6:]) for _ in range(5)]
        assert said[-1]["choices"][0]["delta"]["content"]
        assert owner.engine.metric("vllm:num_requests_running") == 1

    eventually(lambda: owner.engine.metric("vllm:num_requests_running") == 0, within_s=SOON_S)
    eventually(lambda: owner.used() == held.block_set.block_count, within_s=SOON_S)
    assert holders.sets(salt)[0].block_set.set_id == held.block_set.set_id
    again = chats["append"].send(second.messages, cache_salt=salt, tokens=TOKENS)
    assert (again.route, again.text) == ("append", second.text)


@pytest.mark.parametrize("kind", ONE_DECODE, indirect=True)
def test_an_appended_turn_that_is_preempted_ends_with_the_right_text_and_pins_nothing(
    chats: dict[str, Chat], holders: Holders
) -> None:
    salt, tokens = uuid.uuid4().hex, 400
    (first, _), free = script(chats["cold"], [QUESTION]), 24
    messages = answered(first.messages, first.text, QUESTION)
    right = chats["cold"].cold(messages, tokens=tokens)
    chats["append"].send(first.messages, cache_salt=salt, tokens=TOKENS)
    held = holders.one_set(salt)
    owner = holders[held.node]
    preempted = owner.engine.metric("vllm:num_preemptions_total")
    # Hand-offs that nobody reads take all blocks but a few: enough for the turn, or for its rival.
    size = (BLOCKS - 1 - owner.used() - free) // 2 * BLOCK_SIZE
    fillers = [owner.engine.complete(random.choices(VOCABULARY, k=size), COLD, 1) for _ in range(2)]
    assert BLOCKS - 1 - owner.used() <= free + 1

    with ThreadPoolExecutor(1) as pool:
        # Whoever came last gives way.
        rival = pool.submit(owner.engine.complete, random.choices(VOCABULARY, k=BLOCK_SIZE), None, 600)
        eventually(lambda: owner.engine.metric("vllm:num_requests_running") == 1, within_s=30)
        appended = chats["append"].send(messages, cache_salt=salt, tokens=tokens)
        assert rival.result().status == 200

    assert (appended.status, appended.route, appended.text) == (200, "append", right), appended.raw[:300]
    assert owner.engine.metric("vllm:num_preemptions_total") > preempted
    for filler in fillers:
        owner.engine.nixl.release(filler.params["remote_request_id"])
    # In `holders` nothing at all is left in the end.
