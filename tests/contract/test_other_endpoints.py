"""What the router relies on from engines at `/v1/responses` and `/v1/messages`, simulated ones and vLLM itself."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import msgspec
import pytest

from backhaul_connector.wire import Retained
from backhaul_local.engines import MODEL_NAME
from backhaul_router.core.body import Endpoint, TurnBody, parse_body
from backhaul_router.core.clean_lines import CleanLines
from backhaul_router.core.legs import HandOff, decode_body, hand_off, prefill_body
from backhaul_router.core.opening import Opening, opening_of
from backhaul_router.core.usage import with_prompt
from tests.engine_fixtures import Engines
from tests.fakes.engine_pair import SCOPE, Engine, Pair, handle_of

pytestmark = pytest.mark.timeout(300)

RESPONSES, MESSAGES = Endpoint.RESPONSES, Endpoint.MESSAGES
BOTH = pytest.mark.parametrize("endpoint", [RESPONSES, MESSAGES], ids=["responses", "messages"])
WORDS = " ".join(f"word{index}" for index in range(300))
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}


def said(endpoint: Endpoint, *contents: str, tokens: int = 40, **fields: Any) -> TurnBody:
    """Returns a body; contents alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    shape: dict[str, Any] = {"messages": messages, "max_tokens": tokens}
    if endpoint is RESPONSES:
        shape = {"input": messages, "max_output_tokens": tokens, "ignore_eos": True}
    return parse_body(endpoint, msgspec.json.encode({"model": MODEL_NAME, "temperature": 0, **shape, **fields}))


def post(engine: Engine, body: TurnBody, sent: bytes) -> httpx2.Response:
    headers = {"content-type": "application/json", "x-request-id": uuid.uuid4().hex}
    return engine.http.post(body.endpoint.value, content=sent, headers=headers)


def prefill(pair: Pair, body: TurnBody, handle: Mapping[str, Any] | None = None) -> HandOff:
    given = None if handle is None else json.dumps(handle)
    answer = post(pair.prefill, body, prefill_body(body, handle=given, cache_salt=""))
    assert answer.status_code == 200, answer.text
    hand = hand_off(answer.content)
    assert hand.name is not None
    pair.prefill.note_hand_off(hand.name[1])
    return hand


def decode(pair: Pair, body: TurnBody, hand: HandOff, keys: Sequence[str] = (), *, name: str = "") -> httpx2.Response:
    sent = decode_body(body, params=hand.params, scope=SCOPE, keys=keys, cache_salt="", response_id=name)
    return post(pair.decode, body, sent)


def alone(pair: Pair, body: TurnBody) -> str:
    """Returns what the decode engine answers by itself, from nothing."""
    sent = decode_body(body, params=None, scope=SCOPE, keys=(), cache_salt=uuid.uuid4().hex)
    return text_of(post(pair.decode, body, sent).json())


def unreadable(pair: Pair, endpoint: Endpoint) -> bytes:
    """Returns the decode leg of a stream, with the hand-off of an engine that has started anew."""
    body = said(endpoint, WORDS, stream=True)
    params = {**(prefill(pair, body).params or {}), "remote_engine_id": msgspec.Raw(json.dumps("gone").encode())}
    return decode_body(body, params=params, scope=SCOPE, keys=(), cache_salt=uuid.uuid4().hex)


def text_of(document: Mapping[str, Any]) -> str:
    items = document["content"] if document.get("type") == "message" else document["output"][0]["content"]
    return "".join(item["text"] for item in items)


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    """Returns a stream's documents; each event is named after the type of its document."""
    events = [event.split("\n") for event in answer.text.split("\n\n") if event]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [document["type"] for document in documents]
    return documents


@BOTH
def test_handles_go_both_ways_and_the_text_is_the_same(pair: Pair, endpoint: Endpoint) -> None:
    first = said(endpoint, WORDS)
    hand = prefill(pair, first)
    assert hand.params is not None
    assert hand.verdict is not None
    assert hand.verdict.read == 0
    seen = len(pair.decode.agent.messages)
    reply = decode(pair, first, hand, ["key"])
    assert reply.status_code == 200, reply.text
    assert not reply.json().get("kv_transfer_params")
    answer = text_of(reply.json())
    assert answer == alone(pair, first)
    report = pair.decode.agent.wait(Retained, after=seen).set
    assert report.keys == ["key"]

    pair.prefill.eventually_free()
    assert pair.prefill.forget()
    second = said(endpoint, WORDS, answer, "and then?")
    warm = prefill(pair, second, handle_of(report))
    assert warm.verdict is not None
    assert warm.verdict.refused == ""
    assert warm.verdict.read > 300
    assert text_of(decode(pair, second, warm).json()) == alone(pair, second)


@BOTH
def test_a_stream_says_when_it_has_ended_and_carries_no_handle(pair: Pair, endpoint: Endpoint) -> None:
    body = said(endpoint, WORDS, stream=True, tokens=4)
    answer = decode(pair, body, prefill(pair, body), ["key"])
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = CleanLines(endpoint)
    passed = lines.feed(answer.content) + lines.rest()
    assert lines.done
    assert b"kv_transfer_params" not in passed
    kinds = [event["type"] for event in events_of(answer)]
    once = [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    assert once == {
        RESPONSES: [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed",
        ],
        MESSAGES: [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
            "message_stop",
        ],
    }[endpoint]  # fmt: skip


@BOTH
def test_how_a_stream_begins_says_nothing_of_its_answer(pair: Pair, endpoint: Endpoint) -> None:
    body = said(endpoint, WORDS, stream=True, tokens=2)
    events = decode(pair, body, prefill(pair, body)).content.split(b"\n\n")
    shown = [opening_of(b"\n\n".join([*events[:count], b""])) for count in (1, 2, 3)]
    expected = {
        RESPONSES: [Opening.ACCEPTED, Opening.ACCEPTED, Opening.ANSWER],
        MESSAGES: [Opening.UNDECIDED, Opening.ANSWER, Opening.ANSWER],
    }
    assert shown == expected[endpoint]


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_is_counted_as_prefill_did(pair: Pair, endpoint: Endpoint, stream: bool) -> None:
    body = said(endpoint, WORDS, stream=stream, tokens=4)
    hand = prefill(pair, body)
    assert hand.usage is not None
    answer = decode(pair, body, hand)
    documents = events_of(answer) if stream else [answer.json()]
    last = [document for document in documents if "usage" in document or "response" in document][-1]
    told = json.loads(with_prompt(json.dumps(last).encode(), hand.usage))
    usage = (told.get("response") or told)["usage"]
    if endpoint is RESPONSES:
        assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (hand.usage.token_count, 0)
        assert usage["total_tokens"] == hand.usage.token_count + 4
    else:
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (hand.usage.token_count, 0)
    assert usage["output_tokens"] == 4


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (RESPONSES, {"stream": True}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}}),
        (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        (RESPONSES, {"stop": ["a", "e", " "]}),
        (RESPONSES, {"tools": [FUNCTION]}),
        (RESPONSES, {"tools": [FUNCTION], "tool_choice": "required"}),
        (RESPONSES, {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}}),
        (RESPONSES, {"instructions": "be brief", "metadata": {"a": "b"}, "store": True}),
        (MESSAGES, {"stream": True}),
        (MESSAGES, {"stop_sequences": ["a", "e", " "]}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tokens": 1100}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
        (MESSAGES, {"tools": [TOOL]}),
        (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "any"}}),
        (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}),
        (MESSAGES, {"system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]}),
        (MESSAGES, {"metadata": {"user_id": "a"}}),
    ],
    ids=str,
)
def test_prefill_accepts_its_leg_whatever_the_client_asked_for(
    pair: Pair, endpoint: Endpoint, fields: dict[str, Any]
) -> None:
    assert prefill(pair, said(endpoint, WORDS, **fields)).params is not None


def test_a_response_has_the_name_that_it_is_given_and_is_kept_by_its_engine_alone(engines: Engines, pair: Pair) -> None:
    name = f"resp_{uuid.uuid4().hex}"
    first = said(RESPONSES, WORDS, tokens=8, instructions="be brief")
    reply = decode(pair, first, prefill(pair, first), name=name).json()
    assert reply["id"] == name

    after = said(RESPONSES, "and then?", tokens=8, previous_response_id=name)
    second = decode(pair, after, HandOff(None, None, None, failed=False))
    assert second.status_code == 200, second.text
    whole = said(RESPONSES, WORDS, text_of(reply), "and then?", tokens=8)
    assert text_of(second.json()) == alone(pair, whole)
    refused = post(pair.prefill, after, prefill_body(after, handle=None, cache_salt=""))
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "response_id")
    assert pair.decode.http.get(f"/v1/responses/{name}").json()["id"] == name
    assert pair.decode.http.get("/v1/responses/resp_1").status_code == 404


def test_a_turn_after_a_response_is_retained_for_the_next(pair: Pair) -> None:
    name = f"resp_{uuid.uuid4().hex}"
    first = said(RESPONSES, WORDS, tokens=8)
    decode(pair, first, prefill(pair, first), ["one"], name=name)
    seen = len(pair.decode.agent.messages)
    after = said(RESPONSES, "and then?", tokens=8, previous_response_id=name)
    assert decode(pair, after, HandOff({}, None, None, failed=False), ["two"]).status_code == 200
    report = pair.decode.agent.wait(Retained, after=seen, where=lambda message: message.set.keys == ["two"]).set
    assert report.token_count > 300


def test_a_streamed_response_that_cannot_be_loaded_is_broken_off_after_it_was_accepted(pair: Pair) -> None:
    sent = unreadable(pair, RESPONSES)
    pieces: list[bytes] = []
    with (
        pytest.raises(httpx2.RemoteProtocolError),
        pair.decode.http.stream(
            "POST", RESPONSES.value, content=sent, headers={"content-type": "application/json"}
        ) as answer,
    ):
        pieces.extend(answer.iter_raw())
    assert opening_of(b"".join(pieces)) is Opening.ACCEPTED


def test_a_streamed_message_that_cannot_be_loaded_ends_with_an_error(pair: Pair) -> None:
    headers = {"content-type": "application/json"}
    answer = pair.decode.http.post(MESSAGES.value, content=unreadable(pair, MESSAGES), headers=headers)
    assert opening_of(answer.content) is Opening.FAILED
    assert events_of(answer)[-1]["error"]["type"] == "internal_error"


def test_messages_are_counted_and_refused_in_anthropics_form(pair: Pair) -> None:
    body = said(MESSAGES, WORDS)
    fields = {"model": MODEL_NAME, "messages": body.fields["messages"]}
    counted = pair.prefill.http.post("/v1/messages/count_tokens", json=fields).json()
    hand = prefill(pair, body)
    assert hand.usage is not None
    assert counted["input_tokens"] == hand.usage.token_count
    refused = pair.decode.http.post(MESSAGES.value, json={**fields, "model": "other", "max_tokens": 3})
    assert refused.status_code == 404
    assert set(refused.json()) == {"type", "error"}
    assert set(refused.json()["error"]) == {"type", "message"}
