"""Every way of serving a turn, streamed: the texts are those of cold runs, whoever computed what."""

import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from backhaul_local.engines import MODEL_NAME
from backhaul_local.stack import Stack
from tests.e2e.routing.conftest import BUT_ONE_REAL, ONE_PREFILL, ROUTES, TOKENS, Holders, script
from tests.e2e.stack.chat import Chat, Messages, answered, opening
from tests.fakes.engine_pair import Engine

pytestmark = pytest.mark.timeout(400)

QUESTIONS = ("And what came next?", "Where was it?", "Say more about the second point.", "Was that all?")
LONG_QUESTION = "And then? " + opening(225)[1]["content"]
ACCEPT_S = 1.0
"""More than a router needs until a turn has got to an engine that does not answer."""

BLOCK = 32


def test_a_conversation_has_the_same_texts_by_each_route(chats: dict[str, Chat]) -> None:
    turns = script(chats["cold"], QUESTIONS)

    for prefer in ROUTES:
        salt = uuid.uuid4().hex
        replies = [chats[prefer].send(turn.messages, cache_salt=salt, tokens=TOKENS) for turn in turns]

        assert [reply.status for reply in replies] == [200] * len(turns)
        assert [reply.text for reply in replies] == [turn.text for turn in turns]
        assert [reply.route for reply in replies] == ["cold", *[prefer] * len(QUESTIONS)], replies[-1].headers
        assert "kv_transfer_params" not in "".join(reply.raw for reply in replies)


def test_by_estimate_a_new_conversation_is_cold_a_short_question_appended_and_a_long_one_warm(
    chats: dict[str, Chat], new_router: Callable[[str], Chat]
) -> None:
    salt = uuid.uuid4().hex
    turns = script(chats["cold"], [QUESTIONS[0], LONG_QUESTION, *QUESTIONS[1:]], words=600, tokens=2 * TOKENS)
    # It learns what each route costs from these turns alone.
    chat = new_router("alone_tokens = 0\nappend_tokens = 100")

    replies = [chat.send(turn.messages, cache_salt=salt, tokens=2 * TOKENS) for turn in turns]

    assert [reply.text for reply in replies] == [turn.text for turn in turns]
    explained = [reply.headers["x-backhaul-explain"] for reply in replies]
    assert [reply.route for reply in replies[:3]] == ["cold", "append", "warm"], explained
    assert {reply.route for reply in replies[3:]} <= {"append", "warm"}, explained


def test_a_short_prompt_is_computed_by_the_decode_engine_alone_and_read_by_a_prefill_engine_later(
    chats: dict[str, Chat], holders: Holders, engines: Mapping[str, Engine], new_router: Callable[[str], Chat]
) -> None:
    salt = uuid.uuid4().hex
    first, second = script(chats["cold"], QUESTIONS[:1], words=75)
    prefills = [engine for name, engine in engines.items() if name.startswith("prefill")]
    before = [engine.metric("vllm:prompt_tokens_total") for engine in prefills]

    alone = new_router("alone_tokens = 400").send(first.messages, cache_salt=salt, tokens=TOKENS)

    assert (alone.status, alone.route, alone.text) == (200, "cold", first.text), alone.headers
    assert [engine.metric("vllm:prompt_tokens_total") for engine in prefills] == before
    held = holders.one_set(salt).block_set
    warm = chats["warm"].send(second.messages, cache_salt=salt, tokens=TOKENS)
    assert (warm.route, warm.miss, warm.text) == ("warm", "", second.text)
    assert (warm.local, held.token_count - BLOCK < warm.read) == (0, True)


# Edits


def _of_answer(messages: Messages) -> Messages:
    answer = messages[-2]["content"]
    return [*messages[:-2], {"role": "assistant", "content": answer[answer.index(" ", 40) :]}, messages[-1]]


def _of_word(messages: Messages) -> Messages:
    edited = "station".join(messages[1]["content"].rsplit("harbour", 1))
    return [messages[0], {**messages[1], "content": edited}, *messages[2:]]


def _cut_short(messages: Messages) -> Messages:
    return [*messages[:2], messages[-1]]


TOOL = {
    "type": "function",
    "function": {"name": "weigh", "description": "Weighs a load.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("kind", BUT_ONE_REAL, indirect=True)
@pytest.mark.parametrize(
    ("edit", "more", "route"),
    [
        # The holder has the same beginning: it goes on where the texts part.
        pytest.param(_of_answer, {}, "append", id="the last answer"),
        pytest.param(_of_word, {}, "cold", id="a word of the first message"),
        pytest.param(_cut_short, {}, "cold", id="history cut short"),
        pytest.param(list, {"tools": [TOOL]}, "cold", id="a tool added"),
        pytest.param(
            list, {"chat_template_kwargs": {"enable_thinking": False}}, "cold", id="another template argument"
        ),
    ],
)
def test_an_edited_conversation_is_never_continued_from_what_it_was(
    chats: dict[str, Chat], edit: Callable[[Messages], Messages], more: dict[str, Any], route: str
) -> None:
    chat, session, salt = chats["append"], uuid.uuid4().hex, uuid.uuid4().hex
    *turns, last = script(chats["cold"], QUESTIONS[:2])
    for turn in turns:
        assert chat.send(turn.messages, session=session, cache_salt=salt, tokens=TOKENS).status == 200
    edited = edit(last.messages)
    right = chats["cold"].cold(edited, tokens=TOKENS, **more)

    reply = chat.send(edited, session=session, cache_salt=salt, tokens=TOKENS, **more)
    unedited = chat.send(last.messages, session=session, cache_salt=salt, tokens=TOKENS)

    assert (reply.status, reply.route, reply.text) == (200, route, right), reply.headers
    assert right != last.text
    assert (unedited.status, unedited.text) == (200, last.text)


@pytest.mark.parametrize("kind", BUT_ONE_REAL, indirect=True)
def test_completions_of_a_session_are_right_and_not_appended(chats: dict[str, Chat]) -> None:
    """Nobody knows whether the holder has the beginning of what is asked now."""
    session, salt = uuid.uuid4().hex, uuid.uuid4().hex
    fixed = {"model": MODEL_NAME, "temperature": 0, "max_tokens": TOKENS, "min_tokens": TOKENS}

    def ask(prefer: str, prompt: str, cache_salt: str, headers: dict[str, str]) -> tuple[str, str]:
        body = {**fixed, "prompt": prompt, "cache_salt": cache_salt}
        answer = chats[prefer].http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], answer.headers["x-backhaul-route"]

    prompt = opening()[1]["content"]
    text, _ = ask("append", prompt, salt, {"x-session-id": session})
    longer = f"{prompt}{text} and after that"

    for later in (longer, longer.replace("harbour", "station")):
        right, _ = ask("cold", later, uuid.uuid4().hex, {"x-backhaul-reuse": "off"})
        assert ask("append", later, salt, {"x-session-id": session}) == (right, "cold")


# At once


def test_two_forks_at_once_are_both_appended_and_right(chats: dict[str, Chat]) -> None:
    salt = uuid.uuid4().hex
    first, second = script(chats["cold"], QUESTIONS[:1])
    forks = [second.messages, answered(first.messages, first.text, QUESTIONS[1])]
    right = [second.text, chats["cold"].cold(forks[1], tokens=TOKENS)]
    chats["append"].send(first.messages, cache_salt=salt, tokens=TOKENS)

    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda fork: chats["append"].send(fork, cache_salt=salt, tokens=TOKENS), forks))

    assert [(reply.status, reply.route, reply.text) for reply in replies] == [(200, "append", text) for text in right]


def test_a_turn_is_appended_while_a_prefill_engine_reads_what_it_continues(
    chats: dict[str, Chat], holders: Holders
) -> None:
    salt = uuid.uuid4().hex
    first, second, third = script(chats["cold"], QUESTIONS[:2])
    chats["append"].send(first.messages, cache_salt=salt, tokens=TOKENS)
    holders.one_set(salt)

    with ThreadPoolExecutor(2) as pool:
        replies = list(
            pool.map(
                lambda prefer: chats[prefer].send(second.messages, cache_salt=salt, tokens=TOKENS), ("append", "warm")
            )
        )

    assert [(reply.status, reply.text) for reply in replies] == [(200, second.text)] * 2
    # Either may have come when the other had done with the set: then it is cold.
    assert {reply.route for reply in replies} & {"append", "warm"}
    holders.settle(salt)
    last = chats["append"].send(third.messages, cache_salt=salt, tokens=TOKENS)
    assert (last.route, last.text) == ("append", third.text)


# The last one: the node stays dead.


@pytest.mark.parametrize("kind", ONE_PREFILL, indirect=True)
def test_a_turn_whose_holder_dies_before_it_says_anything_is_repeated_cold_on_the_other_node(
    chats: dict[str, Chat], holders: Holders, stack: Stack
) -> None:
    salt = uuid.uuid4().hex
    first, second, third = script(chats["cold"], QUESTIONS[:2])
    chats["append"].send(first.messages, cache_salt=salt, tokens=TOKENS)
    held = holders.one_set(salt)

    stack.freeze(held.node)
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(chats["append"].send, second.messages, cache_salt=salt, tokens=TOKENS)
        time.sleep(ACCEPT_S)
        assert not turn.done()
        stack.kill(held.node)
        reply = turn.result()

    assert (reply.status, reply.text) == (200, second.text), reply.raw
    assert (reply.route, reply.miss) == ("cold", "decode_failed")
    again = chats["append"].send(third.messages, cache_salt=salt, tokens=TOKENS)
    assert (again.route, again.text) == ("append", third.text)
