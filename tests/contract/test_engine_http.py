"""What the router relies on from a pair of engines, whoever plays them.

The pair is a parameter: the fake that other tests use, and real vLLM engines with the connector.
"""

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
