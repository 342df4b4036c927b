"""Conversations over `/v1/responses` and `/v1/messages`: warm, appended, from one response to the next."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from backhaul_local.engines import MODEL_NAME
from tests.e2e.routing.conftest import ONE_PREFILL, TOKENS, Holders
from tests.e2e.stack.chat import Chat, Messages, answered, opening

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("kind", ONE_PREFILL, indirect=True)]

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BOTH = pytest.mark.parametrize("path", [RESPONSES, MESSAGES], ids=["responses", "messages"])
QUESTIONS = ("And what came next?", "And then?", "")


def beginning() -> Messages:
    """Returns a first message to which, and after which, a simulated engine gives answers of full length.

    One that ends early, as it does by chance, leaves hardly anything to read.
    """
    system, user = opening()
    return [system, {**user, "content": f"silver {user['content'].partition(' ')[2]}"}]


@dataclass(frozen=True, slots=True)
class Said:
    """What a client saw of a turn."""

    text: str
    name: str
    headers: Mapping[str, str]

    @property
    def route(self) -> str:
        return self.headers["x-backhaul-route"]


def say(chat: Chat, path: str, messages: Sequence[Mapping[str, Any]], *, salt: str = "", **more: Any) -> Said:
    """Runs one streamed turn with an answer of ``TOKENS`` tokens at most."""
    reuse = bool(salt)
    body: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "stream": True, **more}
    body["cache_salt"] = salt or uuid.uuid4().hex
    if path == RESPONSES:
        body |= {"input": [*messages], "max_output_tokens": TOKENS, "ignore_eos": True}
    else:
        body |= {"system": messages[0]["content"], "messages": [*messages[1:]], "max_tokens": TOKENS}
    answer = chat.http.post(path, json=body, headers={} if reuse else {"x-backhaul-reuse": "off"})
    return said(answer, reuse=reuse)


def said(answer: httpx2.Response, *, reuse: bool) -> Said:
    assert answer.status_code == 200, answer.text
    assert "kv_transfer_params" not in answer.text
    assert ("x-backhaul-reuse" in answer.headers) is not reuse
    documents = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    assert documents[-1]["type"] in ("response.completed", "message_stop")
    deltas = [document["delta"] for document in documents if document["type"].endswith("delta")]
    text = "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)
    return Said(text, documents[0].get("response", {}).get("id", ""), answer.headers)


@BOTH
def test_a_conversation_is_read_back_and_its_texts_are_those_of_cold_turns(chats: dict[str, Chat], path: str) -> None:
    salt, messages = uuid.uuid4().hex, beginning()
    for number, question in enumerate(QUESTIONS):
        turn = say(chats["warm"], path, messages, salt=salt)
        assert turn.route == ("warm" if number else "cold"), turn.headers
        assert turn.text == say(chats["cold"], path, messages).text
        assert not number or int(turn.headers["x-backhaul-read-tokens"]) > 0
        messages = answered(messages, turn.text, question)


def test_each_response_is_gone_on_from_by_the_engine_that_keeps_it(chats: dict[str, Chat], holders: Holders) -> None:
    salt, messages = uuid.uuid4().hex, beginning()[1:]
    turn = say(chats["cold"], RESPONSES, messages, salt=salt)
    held = [holders.one_set(salt)]
    for question in QUESTIONS[:2]:
        messages = answered(messages, turn.text, question)
        new = [{"role": "user", "content": question}]
        turn = say(chats["append"], RESPONSES, new, salt=salt, previous_response_id=turn.name)
        assert (turn.route, turn.headers.get("x-backhaul-miss")) == ("append", None)
        assert turn.text == say(chats["cold"], RESPONSES, messages).text
        held.append(holders.one_set(salt, *held))
    assert len({each.node for each in held}) == 1


def test_a_response_is_gone_on_from_where_nothing_is_appended_and_where_nothing_is_reused(
    chats: dict[str, Chat],
) -> None:
    salt, messages = uuid.uuid4().hex, beginning()[1:]
    first = say(chats["cold"], RESPONSES, messages, salt=salt)
    right = say(chats["cold"], RESPONSES, answered(messages, first.text)).text
    new = [{"role": "user", "content": "And what came next?"}]
    body = {
        "model": MODEL_NAME, "input": new, "previous_response_id": first.name, "cache_salt": salt, "stream": True,
        "max_output_tokens": TOKENS, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    for headers, miss in (({}, "route_off"), ({"x-backhaul-reuse": "off"}, "reuse_off")):
        turn = said(chats["warm"].http.post(RESPONSES, json=body, headers=headers), reuse=not headers)
        assert (turn.route, turn.headers["x-backhaul-miss"], turn.text) == ("cold", miss, right)


def test_a_whole_response_can_be_fetched_from_any_router(chats: dict[str, Chat]) -> None:
    name = say(chats["cold"], RESPONSES, beginning()[1:], salt=uuid.uuid4().hex).name
    for chat in chats.values():
        fetched = chat.http.get(f"{RESPONSES}/{name}")
        assert (fetched.status_code, fetched.json()["id"]) == (200, name)
        assert fetched.headers["x-backhaul-reuse"] == "off"


def test_tokens_are_counted_by_an_engine_without_reuse(chats: dict[str, Chat]) -> None:
    body = {"model": MODEL_NAME, "messages": beginning()[1:]}
    counted = chats["cold"].http.post(f"{MESSAGES}/count_tokens", json=body)
    tokens = chats["cold"].http.post("/tokenize", json=body)
    assert counted.json()["input_tokens"] == tokens.json()["count"] > 300
    assert counted.headers["x-backhaul-reuse"] == tokens.headers["x-backhaul-reuse"] == "off"
