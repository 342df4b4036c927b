"""What the router relies on from a pair of engines, whoever plays them.

The pair is a parameter: the fake that other tests use, and real vLLM engines with the connector.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest

from backhaul_connector.wire import Verdict
from backhaul_local.engines import MODEL_NAME
from backhaul_router.core.body import Endpoint, TurnBody, parse_body
from backhaul_router.core.legs import decode_body, hand_off, prefill_body, tokenize_body
from tests.engine_fixtures import REAL, Engines
from tests.fakes.engine import FakeEngine


@dataclass
class EnginePair:
    """Two engines that can exchange blocks."""

    prefill_url: str
    decode_url: str
    model: str


@pytest.fixture
async def fake_pair() -> AsyncIterator[EnginePair]:
    async with FakeEngine("prefill") as prefill, FakeEngine("decode") as decode:
        yield EnginePair(prefill.url, decode.url, "tiny")


@pytest.fixture(params=["fake", "simulated", REAL])
def engine_pair(request: pytest.FixtureRequest) -> EnginePair:
    if request.param == "fake":
        pair: EnginePair = request.getfixturevalue("fake_pair")
        return pair
    engines: Engines = request.getfixturevalue(f"{request.param}_engines")
    return EnginePair(engines.prefill.url, engines.decode.url, MODEL_NAME)


@pytest.fixture(params=["simulated", REAL])
def honest_pair(request: pytest.FixtureRequest) -> EnginePair:
    """Engines that answer what their tokens make them answer."""
    engines: Engines = request.getfixturevalue(f"{request.param}_engines")
    return EnginePair(engines.prefill.url, engines.decode.url, MODEL_NAME)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as client:
        yield client


pytestmark = pytest.mark.timeout(300)

WORDS = " ".join(f"word{index}" for index in range(300))


def chat(pair: EnginePair, **fields: Any) -> TurnBody:
    document = {"model": pair.model, "messages": [{"role": "user", "content": WORDS}], "temperature": 0, **fields}
    return parse_body(Endpoint.CHAT, msgspec.json.encode(document))


async def post(client: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, str, bytes]:
    headers = {"content-type": "application/json", "x-request-id": uuid.uuid4().hex}
    async with client.post(url, data=body, headers=headers) as response:
        return response.status, response.headers["content-type"], await response.read()


async def prefill(client: aiohttp.ClientSession, pair: EnginePair, body: TurnBody) -> bytes:
    sent = prefill_body(body, handle=None, cache_salt="")
    status, _, reply = await post(client, pair.prefill_url + body.endpoint.value, sent)
    assert status == 200, reply
    return reply


async def decode(client: aiohttp.ClientSession, pair: EnginePair, body: TurnBody) -> tuple[int, str, bytes]:
    hand = hand_off(await prefill(client, pair, body))
    sent = decode_body(body, params=hand.params, scope="0" * 32, keys=(), cache_salt="")
    return await post(client, pair.decode_url + body.endpoint.value, sent)


async def test_prefill_answers_params_and_a_verdict(client: aiohttp.ClientSession, engine_pair: EnginePair) -> None:
    hand = hand_off(await prefill(client, engine_pair, chat(engine_pair)))
    assert hand.params is not None
    assert bytes(hand.params["do_remote_prefill"]) == b"true"
    assert {"remote_block_ids", "remote_engine_id", "remote_host", "remote_port", "remote_request_id"} <= set(
        hand.params
    )
    assert isinstance(hand.verdict, Verdict)
    assert hand.verdict.prompt > 0
    assert (hand.verdict.read, hand.verdict.spent, hand.verdict.refused) == (0, False, "")


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": True}},
        {"min_tokens": 5, "max_tokens": 9},
        {"max_completion_tokens": 9, "min_tokens": 5},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["a", "e", " "]},
        {"response_format": {"type": "json_object"}},
        {"return_token_ids": True},
        {"n": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_prefill_accepts_its_leg_whatever_the_client_asked_for(
    client: aiohttp.ClientSession, engine_pair: EnginePair, fields: dict[str, Any]
) -> None:
    hand = hand_off(await prefill(client, engine_pair, chat(engine_pair, **fields)))
    assert hand.params is not None


async def test_decode_takes_the_params_and_answers_none(client: aiohttp.ClientSession, engine_pair: EnginePair) -> None:
    status, kind, reply = await decode(client, engine_pair, chat(engine_pair, max_tokens=4))
    assert (status, kind.partition(";")[0]) == (200, "application/json")
    document = json.loads(reply)
    assert document["choices"][0]["message"]["role"] == "assistant"
    assert not document.get("kv_transfer_params")


async def test_a_decode_stream_is_events_that_end_with_done_and_carry_no_params(
    client: aiohttp.ClientSession, engine_pair: EnginePair
) -> None:
    status, kind, reply = await decode(client, engine_pair, chat(engine_pair, max_tokens=4, stream=True))
    assert (status, kind.partition(";")[0]) == (200, "text/event-stream")
    assert reply.endswith(b"data: [DONE]\n\n")
    assert b"kv_transfer_params" not in reply


async def test_a_completion_of_token_ids_works_on_both(client: aiohttp.ClientSession, engine_pair: EnginePair) -> None:
    document = {"model": engine_pair.model, "prompt": list(range(20, 120)), "max_tokens": 3, "temperature": 0}
    body = parse_body(Endpoint.COMPLETIONS, msgspec.json.encode(document))
    status, _, _ = await decode(client, engine_pair, body)
    assert status == 200


async def test_tokenizing_gives_the_prompts_tokens(client: aiohttp.ClientSession, engine_pair: EnginePair) -> None:
    body = chat(engine_pair)
    status, _, reply = await post(client, f"{engine_pair.prefill_url}/tokenize", tokenize_body(body))
    assert status == 200
    hand = hand_off(await prefill(client, engine_pair, body))
    assert hand.usage is not None
    assert len(json.loads(reply)["tokens"]) == hand.usage.token_count


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        pytest.param({"model": "no-such-model"}, 404, id="unknown model"),
        pytest.param({"stream_options": {"include_usage": True}}, 400, id="stream options without stream"),
        pytest.param({"min_tokens": 9, "max_tokens": 2}, 400, id="min_tokens above max_tokens"),
        pytest.param({"cache_salt": "a/b"}, 400, id="cache salt"),
    ],
)
async def test_refusals_have_openais_form(
    client: aiohttp.ClientSession, engine_pair: EnginePair, fields: dict[str, Any], status: int
) -> None:
    document = {"model": engine_pair.model, "messages": [{"role": "user", "content": "hi"}], **fields}
    url = f"{engine_pair.decode_url}/v1/chat/completions"
    got, kind, reply = await post(client, url, msgspec.json.encode(document))
    assert (got, kind.partition(";")[0]) == (status, "application/json")
    assert {"message", "type", "param", "code"} <= set(json.loads(reply)["error"])


async def test_models_say_more_than_their_name(client: aiohttp.ClientSession, engine_pair: EnginePair) -> None:
    async with client.get(f"{engine_pair.decode_url}/v1/models") as response:
        entries = (await response.json())["data"]
    assert engine_pair.model in [entry["id"] for entry in entries]
    assert entries[0]["max_model_len"] > 0


# What the engines answer by themselves. The fake above has no say in it.


async def ask(client: aiohttp.ClientSession, pair: EnginePair, path: str, **fields: Any) -> dict[str, Any]:
    """Asks the decode engine; returns the document of its answer."""
    status, _, reply = await post(client, pair.decode_url + path, msgspec.json.encode({"temperature": 0, **fields}))
    assert status == 200, reply
    document: dict[str, Any] = json.loads(reply)
    return document


async def events(client: aiohttp.ClientSession, pair: EnginePair, path: str, **fields: Any) -> list[Any]:
    """Asks the decode engine for a stream; returns its events' documents, without the last, which says that it ends."""
    body = msgspec.json.encode({"temperature": 0, "stream": True, **fields})
    status, _, reply = await post(client, pair.decode_url + path, body)
    assert status == 200, reply
    *lines, done, _ = reply.decode().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
PROMPT = list(range(400, 480))
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


async def test_a_chats_stream_says_the_role_then_each_token_then_what_was_used(
    client: aiohttp.ClientSession, honest_pair: EnginePair
) -> None:
    fields = {"messages": HELLO, "max_tokens": 4, "min_tokens": 4, "return_token_ids": True}
    whole = await ask(client, honest_pair, CHAT, **fields)

    role, *pieces, usage = await events(client, honest_pair, CHAT, **fields, stream_options={"include_usage": True})

    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["prompt_token_ids"] == whole["prompt_token_ids"]
    # vLLM puts tokens together that come faster than they are sent (v1/engine/output_processor.py).
    assert 1 <= len(pieces) <= 4
    assert all(piece["object"] == "chat.completion.chunk" and piece["id"] == role["id"] for piece in pieces)
    texts = [piece["choices"][0]["delta"]["content"] for piece in pieces]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    tokens = [token for piece in pieces for token in piece["choices"][0]["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert usage["choices"] == []
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage["usage"][name] for name in counted] == [whole["usage"][name] for name in counted]


async def test_a_completions_stream_has_the_prompts_tokens_in_its_first_event_only(
    client: aiohttp.ClientSession, honest_pair: EnginePair
) -> None:
    first, *rest = await events(
        client, honest_pair, COMPLETIONS, prompt=PROMPT, max_tokens=3, ignore_eos=True, return_token_ids=True
    )

    assert first["choices"][0]["prompt_token_ids"] == PROMPT
    assert all(event["choices"][0]["prompt_token_ids"] is None for event in rest)
    counts = [len(event["choices"][0]["token_ids"]) for event in (first, *rest)]
    assert sum(counts) == 3
    assert all(counts)


@pytest.mark.parametrize("stream", [False, True])
async def test_lists_of_prompts_are_answered_in_their_order(
    client: aiohttp.ClientSession, honest_pair: EnginePair, stream: bool
) -> None:
    prompts = [PROMPT, PROMPT[:50], PROMPT[10:]]
    fields = {"max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    alone = [
        (await ask(client, honest_pair, COMPLETIONS, prompt=prompt, **fields))["choices"][0]["token_ids"]
        for prompt in prompts
    ]

    tokens: dict[int, list[int]] = {}
    ask_for = events if stream else ask
    answer = await ask_for(client, honest_pair, COMPLETIONS, prompt=prompts, **fields)
    for document in answer if isinstance(answer, list) else [answer]:
        for choice in document["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])

    assert [tokens[index] for index in range(3)] == alone


async def test_several_choices_are_numbered(client: aiohttp.ClientSession, honest_pair: EnginePair) -> None:
    reply = await ask(client, honest_pair, CHAT, messages=HELLO, n=3, temperature=1, max_tokens=2, min_tokens=2)

    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["completion_tokens"] == 6


async def test_a_stop_string_is_named_and_left_out(client: aiohttp.ClientSession, honest_pair: EnginePair) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    text = (await ask(client, honest_pair, COMPLETIONS, **fields))["choices"][0]["text"]
    stop = text.split()[2]

    cut = (await ask(client, honest_pair, COMPLETIONS, **fields, stop=stop))["choices"][0]
    kept = await ask(client, honest_pair, COMPLETIONS, **fields, stop=stop, include_stop_str_in_output=True)
    pieces = await events(client, honest_pair, COMPLETIONS, **fields, stop=[stop])

    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["text"] == text[: text.index(stop)]
    assert kept["choices"][0]["text"] == cut["text"] + stop
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == cut["text"]


async def test_a_stop_token_is_named_and_its_text_left_out(
    client: aiohttp.ClientSession, honest_pair: EnginePair
) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    tokens = (await ask(client, honest_pair, COMPLETIONS, **fields))["choices"][0]["token_ids"]
    expected = tokens[: tokens.index(tokens[3]) + 1]

    choice = (await ask(client, honest_pair, COMPLETIONS, **fields, stop_token_ids=[tokens[3]]))["choices"][0]
    shorter = (await ask(client, honest_pair, COMPLETIONS, **{**fields, "max_tokens": len(expected) - 1}))["choices"][0]
    later = await ask(client, honest_pair, COMPLETIONS, **fields, stop_token_ids=[tokens[3]], min_tokens=6)

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[3])
    assert choice["token_ids"] == expected
    assert choice["text"] == shorter["text"]
    assert later["usage"]["completion_tokens"] >= 6


async def test_max_completion_tokens_goes_before_max_tokens(
    client: aiohttp.ClientSession, honest_pair: EnginePair
) -> None:
    reply = await ask(client, honest_pair, CHAT, messages=HELLO, max_tokens=9, max_completion_tokens=3, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_logprobs_have_their_shape(client: aiohttp.ClientSession, honest_pair: EnginePair) -> None:
    limits = {"max_tokens": 2, "ignore_eos": True}
    chat = await ask(client, honest_pair, CHAT, messages=HELLO, logprobs=True, top_logprobs=2, **limits)
    completion = await ask(client, honest_pair, COMPLETIONS, prompt=PROMPT, logprobs=1, **limits)

    content = chat["choices"][0]["logprobs"]["content"]
    assert [set(entry) for entry in content] == [{"token", "logprob", "bytes", "top_logprobs"}] * 2
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    logprobs = completion["choices"][0]["logprobs"]
    assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert [len(logprobs[name]) for name in sorted(logprobs)] == [2, 2, 2, 2]


async def test_text_that_comes_back_is_made_of_the_same_tokens(
    client: aiohttp.ClientSession, honest_pair: EnginePair
) -> None:
    """What reuse rests on: the next turn's prompt begins with this one's tokens."""
    limits = {"max_tokens": 20, "min_tokens": 20, "return_token_ids": True}
    first = await ask(client, honest_pair, CHAT, messages=HELLO, **limits)
    answer = first["choices"][0]["message"]["content"]
    messages = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]

    second = await ask(client, honest_pair, CHAT, messages=messages, max_tokens=1, return_token_ids=True)

    common = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    assert second["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
    equal = next(
        (n for n, pair in enumerate(zip(common, second["prompt_token_ids"], strict=False)) if pair[0] != pair[1]),
        len(common),
    )
    assert equal >= len(first["prompt_token_ids"]) + 10


BAD, MALFORMED = "BadRequestError", "Bad Request"


@pytest.mark.parametrize(
    ("path", "fields", "status", "kind", "param"),
    [
        (CHAT, {"model": "no-such-model", "messages": HELLO}, 404, "NotFoundError", "model"),
        (CHAT, {}, 400, MALFORMED, "body.messages"),
        (CHAT, {"messages": HELLO, "stream_options": {}}, 200, "", None),
        (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, 400, BAD, "stream_options"),
        (CHAT, {"messages": HELLO, "cache_salt": "a/b"}, 400, BAD, "cache_salt"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, BAD, "top_logprobs"),
        (CHAT, {"messages": HELLO, "max_tokens": "many"}, 400, MALFORMED, "body.max_tokens"),
        (CHAT, {"messages": HELLO, "tools": []}, 400, BAD, "tools"),
        (CHAT, {"messages": HELLO, "tool_choice": "auto"}, 400, BAD, "tool_choice"),
        (CHAT, {"messages": HELLO, "min_tokens": 9, "max_tokens": 2}, 400, BAD, None),
        (CHAT, {"messages": HELLO, "n": 2, "temperature": 0}, 400, BAD, None),
        (CHAT, {"messages": HELLO, "temperature": 3}, 400, BAD, "temperature"),
        (CHAT, {"messages": HELLO, "stop": [""]}, 400, BAD, None),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, BAD, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, BAD, None),
        (COMPLETIONS, {}, 400, BAD, "prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, BAD, "prompt"),
        (COMPLETIONS, {"prompt": [10_000_000]}, 400, BAD, None),
        (COMPLETIONS, {"prompt": [400] * 4000}, 400, BAD, "input_tokens"),
        (COMPLETIONS, {"prompt": "x y z " * 30_000}, 400, BAD, "input_text"),
    ],
)
async def test_refusals_are_worded_as_in_vllm(
    client: aiohttp.ClientSession,
    honest_pair: EnginePair,
    path: str,
    fields: dict[str, Any],
    status: int,
    kind: str,
    param: str | None,
) -> None:
    got, _, reply = await post(client, honest_pair.decode_url + path, msgspec.json.encode(fields))
    document = json.loads(reply)
    assert got == status, document
    if status != 200:
        error = document["error"]
        assert (error["type"], error["param"], error["code"]) == (kind, param, status), error


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", CHAT, b"{", {}, 400),
        ("POST", CHAT, b"{}", {"content-type": "text/plain"}, 400),
        ("POST", COMPLETIONS, b'{"prompt":"x"}', {"x-data-parallel-rank": "7"}, 400),
        ("POST", COMPLETIONS, b'{"prompt":"x"}', {"x-data-parallel-rank": "seven"}, 200),
        ("GET", "/nope", None, {}, 404),
        ("GET", CHAT, None, {}, 405),
    ],
)
async def test_what_no_field_can_mend_is_refused(
    client: aiohttp.ClientSession,
    honest_pair: EnginePair,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
) -> None:
    headers = {"content-type": "application/json", **headers}
    async with client.request(method, honest_pair.decode_url + path, data=body, headers=headers) as response:
        document = await response.json()
        assert response.status == status, document
    if status == 400:
        assert set(document["error"]) == {"message", "type", "param", "code"}
    elif status != 200:
        assert set(document) == {"detail"}


async def test_who_asks_how_it_is_gets_an_answer(client: aiohttp.ClientSession, honest_pair: EnginePair) -> None:
    async with client.get(f"{honest_pair.decode_url}/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with client.get(f"{honest_pair.decode_url}/version") as response:
        assert (await response.json())["version"].partition("+")[0] == "0.32.0"
    async with client.get(f"{honest_pair.decode_url}/metrics") as response:
        text = await response.text()
    for name in METRICS:
        assert f"\n{name}" in text, name


METRICS = (
    'vllm:num_requests_running{engine="0",',
    'vllm:num_requests_waiting{engine="0",',
    'vllm:kv_cache_usage_perc{engine="0",',
    'vllm:num_preemptions_total{engine="0",',
    'vllm:prompt_tokens_total{engine="0",',
    'vllm:prompt_tokens_by_source_total{engine="0",',
    'vllm:generation_tokens_total{engine="0",',
    'vllm:prefix_cache_hits_total{engine="0",',
    "vllm:cache_config_info{",
)


async def test_what_a_client_leaves_is_not_computed_on(client: aiohttp.ClientSession, honest_pair: EnginePair) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    async with client.post(f"{honest_pair.decode_url}{COMPLETIONS}", json=body) as response:
        assert await response.content.readline()
        response.close()

    async with asyncio.timeout(2):
        while await _running(client, honest_pair):  # noqa: ASYNC110  # another process has no event to wait for
            await asyncio.sleep(0.05)


async def _running(client: aiohttp.ClientSession, pair: EnginePair) -> float:
    async with client.get(f"{pair.decode_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))
