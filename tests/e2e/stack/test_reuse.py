"""Reuse, proved: with it the texts are those without it, and tokens come from where the headers say."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx2
import pytest

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_local.engines import MODEL_NAME
from backhaul_local.stack import Stack
from tests.e2e.stack.chat import REPLY_TOKENS, Chat, Messages, answered, opening
from tests.e2e.stack.conftest import conversation

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

BLOCK = 32
ANCHOR = 64
"""Tokens between two anchors of a history as short as these."""


def common_tokens(stack: Stack, one: Messages, one_more: dict[str, Any], other: Messages, more: dict[str, Any]) -> int:
    """Returns how many leading tokens two prompts share."""
    prompts = []
    for messages, extra in ((one, one_more), (other, more)):
        body = {"model": MODEL_NAME, "messages": messages, **extra}
        answer = httpx2.post(f"{stack.node('prefill-1').url}/tokenize", json=body, trust_env=False)
        prompts.append(answer.json()["tokens"])
    return next((i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b), min(map(len, prompts)))


def external_tokens(stack: Stack) -> float:
    """Returns P's own count of the tokens that it read from another engine."""
    text = httpx2.get(f"{stack.node('prefill-1').url}/metrics", trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_by_source_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'source="external_kv_transfer"' in line)


def test_five_streamed_turns_have_the_texts_of_cold_ones_and_read_the_whole_history_back(
    chat: Chat, stack: Stack
) -> None:
    messages, retained = opening(), 0
    for number in range(1, 6):
        before = external_tokens(stack)

        reply = chat.send(messages)

        assert reply.status == 200, reply.raw
        assert reply.text == chat.cold(messages)
        assert reply.read == external_tokens(stack) - before
        assert reply.route == ("cold" if number == 1 else "warm"), reply.miss
        assert retained - BLOCK < reply.local + reply.read
        assert "kv_transfer_params" not in reply.raw
        retained = reply.prompt + REPLY_TOKENS - 1
        messages = answered(messages, reply.text)


def test_a_reply_that_is_not_streamed_carries_no_handle_and_is_reused_too(chat: Chat) -> None:
    messages, (first,) = conversation(chat, stream=False)

    second = chat.send(messages, stream=False)

    assert "kv_transfer_params" not in first.raw + second.raw
    assert (second.route, second.text) == ("warm", chat.cold(messages))


def test_what_a_client_sends_as_kv_transfer_params_reaches_no_engine(chat: Chat) -> None:
    messages = opening()
    stolen = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.9",
        "remote_port": 9,
        "remote_engine_id": "x",
        "remote_request_id": "y",
        "remote_block_ids": [[1, 2, 3]],
        "tp_size": 1,
    }

    reply = chat.send(messages, kv_transfer_params=stolen)

    assert (reply.status, reply.text) == (200, chat.cold(messages))


def _word(messages: Messages) -> Messages:
    edited = "station".join(messages[1]["content"].rsplit("harbour", 1))
    return [messages[0], {**messages[1], "content": edited}, *messages[2:]]


def _system(messages: Messages) -> Messages:
    return [{"role": "system", "content": "You are a careful assistant."}, *messages[1:]]


def _no_answer(messages: Messages) -> Messages:
    return [message for index, message in enumerate(messages) if index != 2]


def _no_reasoning(messages: Messages) -> Messages:
    answer = messages[2]["content"]
    return [*messages[:2], {"role": "assistant", "content": answer[answer.index(" ", 40) :]}, *messages[3:]]


def _cut_short(messages: Messages) -> Messages:
    return [*messages[:2], messages[-1]]


TOOL = {
    "type": "function",
    "function": {"name": "weigh", "description": "Weighs a load.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("edit", "more"),
    [
        pytest.param(_word, {}, id="a word"),
        pytest.param(_system, {}, id="another system prompt"),
        pytest.param(_no_answer, {}, id="a dropped assistant turn"),
        pytest.param(_no_reasoning, {}, id="a removed reasoning part"),
        pytest.param(_cut_short, {}, id="history cut short"),
        pytest.param(lambda messages: messages, {"tools": [TOOL]}, id="a tool added"),
    ],
)
def test_reuse_stops_at_an_edit_of_the_history(chat: Chat, stack: Stack, edit: Any, more: dict[str, Any]) -> None:
    session = uuid.uuid4().hex
    messages, _ = conversation(chat, turns=2, session=session)
    edited = edit(messages)
    common = common_tokens(stack, messages, {}, edited, more)

    reply = chat.send(edited, session=session, **more)

    right = chat.cold(edited, **more)
    assert reply.text == right
    assert common // ANCHOR * ANCHOR <= reply.local + reply.read <= common
    # A poisoned cache of P would show without any handle.
    again = chat.send(edited, reuse=False, **more)
    assert again.text == right


def test_two_forks_of_one_conversation_are_both_right_and_read_the_set_at_most_once(chat: Chat) -> None:
    messages, _ = conversation(chat)
    forks = [[*messages[:-1], {"role": "user", "content": question}] for question in ("And then?", "Where was it?")]

    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(chat.send, forks))

    assert sorted(reply.route for reply in replies) == ["cold", "warm"]
    assert [reply.text for reply in replies] == [chat.cold(fork) for fork in forks]


def test_a_title_request_between_two_turns_does_not_cost_the_second_its_reuse(chat: Chat) -> None:
    session = uuid.uuid4().hex
    messages, _ = conversation(chat, session=session)
    title = [{"role": "user", "content": f"Give this conversation a title: {messages[1]['content'][32:]}"}]

    titled = chat.send(title, session=session, tokens=8)
    second = chat.send(messages, session=session)

    assert (titled.status, titled.route) == (200, "cold")
    assert (second.route, second.text) == ("warm", chat.cold(messages))


def test_two_tenants_with_the_same_text_share_nothing(tenants: dict[str, Chat]) -> None:
    messages, (first,) = conversation(tenants["north"])

    stranger = tenants["south"].send(messages)
    own = tenants["north"].send(messages)

    assert (stranger.route, stranger.local, stranger.read) == ("cold", 0, 0)
    assert stranger.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert (own.route, own.text) == ("warm", stranger.text)
    assert own.local + own.read >= first.prompt


def test_a_tenant_without_a_key_is_refused(tenants: dict[str, Chat]) -> None:
    answer = tenants["north"].http.post("/v1/chat/completions", json={}, headers={"authorization": "Bearer guess"})

    assert answer.status_code == 401
    assert answer.json()["error"]["message"]


def test_turns_through_different_routers_are_one_conversation(chats: list[Chat]) -> None:
    messages, _ = conversation(chats[0])

    second = chats[1].send(messages)

    assert (second.route, second.text) == ("warm", chats[0].cold(messages))


def test_the_same_turn_sent_to_both_routers_at_once_is_warm_once_and_right_twice(chats: list[Chat]) -> None:
    messages, _ = conversation(chats[0])

    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda chat: chat.send(messages), chats))

    assert sorted(reply.route for reply in replies) == ["cold", "warm"]
    assert {reply.text for reply in replies} == {chats[0].cold(messages)}


def test_the_grpc_face_runs_the_same_turns(chats: list[Chat], stack: Stack) -> None:
    messages, _ = conversation(chats[0])
    body = {"model": MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": REPLY_TOKENS}
    request = router_pb2.ChatCompletionsRequest(body=json.dumps({**body, "min_tokens": REPLY_TOKENS}).encode())

    with grpc.insecure_channel(stack.grpc_routers[1], options=[("grpc.enable_http_proxy", 0)]) as channel:
        steps = list(router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(request, timeout=60))

    started, answer = steps[0].started, json.loads(b"".join(step.chunk for step in steps[1:]))
    assert (started.route, started.miss_reason) == ("warm", "")
    assert started.read_token_count > 0
    assert answer["choices"][0]["message"]["content"] == chats[0].cold(messages)
    assert "kv_transfer_params" not in answer


def test_completions_with_a_session_id_are_reused(chat: Chat) -> None:
    session = uuid.uuid4().hex
    body = {"model": MODEL_NAME, "temperature": 0, "max_tokens": REPLY_TOKENS, "min_tokens": REPLY_TOKENS}
    prompt = opening()[1]["content"]

    first = chat.http.post("/v1/completions", json={**body, "prompt": prompt}, headers={"x-session-id": session})
    longer = prompt + first.json()["choices"][0]["text"] + " and after that"
    second = chat.http.post("/v1/completions", json={**body, "prompt": longer}, headers={"x-session-id": session})
    cold = chat.http.post(
        "/v1/completions",
        json={**body, "prompt": longer, "cache_salt": session},
        headers={"x-backhaul-reuse": "off"},
    )

    assert (first.status_code, second.status_code, cold.status_code) == (200, 200, 200)
    assert (second.headers["x-backhaul-route"], cold.headers["x-backhaul-route"]) == ("warm", "cold")
    assert second.json()["choices"][0]["text"] == cold.json()["choices"][0]["text"]
