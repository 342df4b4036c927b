"""What is no turn: passed on to one engine, without what no engine may be told, or refused. The answer says so."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from backhaul_router import instruments
from backhaul_router.core.passing import PASSED
from tests.fakes.engine import FakeEngine, answer, bare_500, refuse
from tests.fakes.readings import Readings
from tests.fakes.router_stack import MODEL, Got, RouterStack, router_stack
from tests.unit.router.test_tenants import FILE

EMBEDDINGS, COUNT = "/v1/embeddings", "/v1/messages/count_tokens"


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(body_limit=100_000, answer_limit=100_000) as stack:
        yield stack


async def embed(stack: RouterStack, headers: dict[str, str] | None = None, **fields: Any) -> Got:
    return await stack.post(EMBEDDINGS, {"model": MODEL, "input": "hi", **fields}, headers)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", COUNT, EMBEDDINGS])
async def test_it_goes_to_a_prefill_engine_and_says_that_reuse_is_off(
    read: Readings, stack: RouterStack, path: str
) -> None:
    got = await stack.post(path, {"model": MODEL, "prompt": "hi"})
    assert (got.status, got.headers["x-backhaul-reuse"]) == (200, "off")
    assert "x-backhaul-route" not in got.headers
    assert len(stack.prefill.passed) + len(stack.prefill.tokenized) == 1
    assert len(stack.decode.passed) + len(stack.decode.tokenized) == 0
    assert read.counted(instruments.PASSED_ON) == {(path,): 1}


async def test_no_engine_is_told_what_only_a_router_may_tell(stack: RouterStack) -> None:
    reserved = {"kv_transfer_params": {"remote_host": "10.0.0.9"}, "request_id": "mine", "session_id": "mine"}
    xargs = {"kv_transfer_params": {}, "a": 1}
    await embed(stack, {"x-request-id": "mine", "x-data-parallel-rank": "7"}, **reserved, vllm_xargs=xargs)
    (leg,) = stack.prefill.passed
    assert leg.body == {"model": MODEL, "input": "hi", "vllm_xargs": {"a": 1}}
    assert leg.headers["x-request-id"] != "mine"
    assert leg.headers["x-data-parallel-rank"] == "0"


async def test_an_answer_carries_no_handle(stack: RouterStack) -> None:
    stack.prefill.then(answer({"data": [], "kv_transfer_params": {"remote_host": "10.0.0.9"}}))
    assert json.loads((await embed(stack)).body) == {"data": []}


async def test_without_a_prefill_engine_decode_answers(stack: RouterStack) -> None:
    await stack.lose(stack.prefill)
    stack.router.table.drop_orphan(f"prefill-{stack.prefill.port}")
    assert (await embed(stack)).status == 200
    assert len(stack.decode.passed) == 1


async def test_it_goes_to_who_serves_the_model(stack: RouterStack) -> None:
    other = await stack.add(FakeEngine("prefill", models=("embedder",)))
    got = await stack.post(EMBEDDINGS, {"model": "embedder", "input": "hi"})
    assert (got.status, len(other.passed)) == (200, 1)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ([], 400),
        ({"input": "hi"}, 400),
        ({"model": 3}, 400),
        ({"model": MODEL, "cache_salt": 3}, 400),
        ({"model": MODEL, "vllm_xargs": []}, 400),
        ({"model": "other"}, 404),
        ({"model": MODEL, "input": "x" * 100_000}, 413),
    ],
    ids=str,
)
async def test_what_is_wrong_with_a_request_is_said(stack: RouterStack, body: Any, status: int) -> None:
    got = await stack.post(EMBEDDINGS, body)
    assert got.status == status
    assert set(json.loads(got.body)["error"]) == {"message", "type", "param", "code"}
    assert stack.prefill.passed == []


async def test_an_engines_refusal_passes_and_its_failure_is_told(stack: RouterStack) -> None:
    stack.prefill.then(refuse(400, "too long"), bare_500(), answer({"x": "y" * 100_000}))
    refused, failed, large = [await embed(stack) for _ in range(3)]
    assert (refused.status, json.loads(refused.body)["error"]["message"]) == (400, "too long")
    assert (failed.status, json.loads(failed.body)["error"]["code"]) == (502, "engine_failed")
    assert large.status == 502


async def test_a_path_that_the_engines_lack_is_told_as_such(stack: RouterStack) -> None:
    got = await stack.post("/v1/rerank", {"model": MODEL, "query": "q", "documents": []})
    error = json.loads(got.body)["error"]
    assert (got.status, error["code"]) == (404, "not_found")
    assert "the engines do not serve /v1/rerank" in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/files"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/images/generations"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/collective_rpc"),
        ("POST", "/sleep"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/invocations"),
        ("GET", "/metrics"),
        ("POST", "/tokenize/"),
        ("POST", "//tokenize"),
        ("POST", "/v1/../reset_prefix_cache"),
        ("POST", "/v1/responses/"),
    ],
)
async def test_everything_else_is_refused_and_reaches_no_engine(stack: RouterStack, method: str, path: str) -> None:
    headers = {"content-type": "application/json"}
    async with stack.client.request(method, f"{stack.url}{path}", data=b'{"model":"tiny"}', headers=headers) as got:
        error = (await got.json())["error"]
        assert got.status in (404, 405)
    assert error["code"] in ("not_found", "method_not_allowed")
    assert stack.prefill.passed == stack.decode.passed == stack.prefill.legs == stack.decode.legs == []


async def test_tenants_are_kept_apart_where_prompts_are_cached(tmp_path: Path) -> None:
    tenants, key = tmp_path / "tenants.toml", tmp_path / "key"
    tenants.write_text(FILE)
    key.write_text("k" * 32)
    async with router_stack(tenants_file=str(tenants), cluster_key_file=str(key)) as stack:
        assert (await embed(stack)).status == 401
        for secret in ("blue-1", "red-1", "red-2"):
            headers = {"authorization": f"Bearer {secret}"}
            assert (await embed(stack, headers, cache_salt="mine")).status == 200
            assert (await stack.post("/detokenize", {"model": MODEL, "tokens": []}, headers)).status == 200
        part = {"type": "image_url", "image_url": None, "uuid": "somebodys"}
        named = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
        assert (await stack.post("/pooling", named, headers)).status == 400
        salts = [leg.body.get("cache_salt") for leg in stack.prefill.passed if leg.path == EMBEDDINGS]
        assert len({*salts}) == 2
        assert "mine" not in salts
        assert all("cache_salt" not in leg.body for leg in stack.prefill.passed if leg.path == "/detokenize")
        assert all("authorization" not in leg.headers for leg in stack.prefill.passed)


async def test_the_official_client_gets_embeddings(stack: RouterStack) -> None:
    data = [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]
    stack.prefill.then(answer({"object": "list", "data": data, "model": MODEL, "usage": {}}))
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="k", max_retries=0) as client:
        reply = await client.embeddings.create(model=MODEL, input="hi", encoding_format="float")
    assert reply.data[0].embedding == [0.5, 1.0]


def test_nothing_is_passed_on_that_is_a_turn_or_changes_an_engine() -> None:
    assert not {path for path in PASSED if path.endswith(("completions", "responses", "messages", "cache"))}
