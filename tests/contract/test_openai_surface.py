"""What OpenAI clients rely on, looked at without one: errors in OpenAI's form, bodies, ids, headers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine, answer
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(body_limit=100_000) as stack:
        yield stack


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", CHAT, b"{", {}, 400),
        ("POST", CHAT, b'{"model":"tiny","messages":"x"}', {}, 400),
        ("POST", CHAT, b'{"model":"tiny","messages":[]}', {}, 400),
        ("POST", CHAT, b"{}", {"content-type": "text/plain"}, 415),
        ("POST", CHAT, b"{}", {"content-encoding": "gzip"}, 400),
        ("POST", CHAT, b"x" * 100_001, {}, 413),
        ("GET", CHAT, None, {}, 405),
        ("POST", "/v1/models", b"{}", {}, 405),
        ("POST", "/v1/embeddings", b"{}", {}, 400),
        ("POST", "/v1/responses", b"{}", {}, 400),
        ("POST", "/v1/files", b"{}", {}, 404),
        ("GET", "/nope", None, {}, 404),
        ("GET", "/%0a%ff", None, {}, 404),
    ],
)
async def test_our_own_errors_have_openais_form(
    stack: RouterStack, method: str, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    headers = {"content-type": "application/json", "x-request-id": "mine", **headers}
    async with stack.client.request(method, f"{stack.url}{path}", data=body, headers=headers) as response:
        document = await response.json()
        assert response.status == status
        assert response.headers["x-request-id"] == "mine"
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert document["error"]["message"]
    assert isinstance(document["error"]["code"], str)
    assert stack.prefill.legs == stack.decode.legs == []


async def test_a_body_without_a_length_is_limited_too(stack: RouterStack) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 10_000

    headers = {"content-type": "application/json"}
    async with stack.client.post(f"{stack.url}{CHAT}", data=pieces(), headers=headers) as response:
        assert response.status == 413


async def test_a_client_may_ask_before_it_sends_the_body(stack: RouterStack) -> None:
    """As curl does for bodies of more than a megabyte."""
    async with asyncio.timeout(2):
        async with stack.client.post(f"{stack.url}{CHAT}", json=chat_body("hi"), expect100=True) as response:
            assert response.status == 200


@pytest.mark.parametrize("given", ["", "a b", "ä", "x" * 129, "a\tb"])
async def test_an_unsafe_request_id_is_replaced(stack: RouterStack, given: str) -> None:
    got = await stack.chat("hi", headers={"x-request-id": given})
    assert got.status == 200
    assert got.headers["x-request-id"] != given


async def test_a_safe_request_id_comes_back_and_never_reaches_an_engine(stack: RouterStack) -> None:
    for _ in range(2):
        got = await stack.chat("hi", headers={"x-request-id": "same"}, request_id="same")
        assert (got.status, got.headers["x-request-id"]) == (200, "same")
    for leg in (*stack.prefill.legs, *stack.decode.legs):
        assert "same" not in leg.headers["x-request-id"]
        assert b"same" not in leg.raw


async def test_a_client_cannot_steer(stack: RouterStack) -> None:
    """Nothing of what a client says about hosts, ranks or transfers reaches an engine."""
    evil = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80, "remote_block_ids": [[1]]}
    headers = {"x-prefiller-host-port": "169.254.169.254:80", "x-data-parallel-rank": "1", "x-session-id": "s"}
    got = await stack.chat("hi", headers=headers, kv_transfer_params=evil, ec_transfer_params=evil)
    assert got.status == 200
    for leg in (*stack.prefill.legs, *stack.decode.legs):
        assert b"169.254" not in leg.raw
        assert not {"x-prefiller-host-port", "x-session-id"} & set(leg.headers)
        assert leg.headers.get("x-data-parallel-rank", "0") == "0", "the router's own word for its only engine"


@pytest.mark.parametrize("choices", [1, 2])
async def test_no_reply_carries_a_handle(choices: int) -> None:
    async with router_stack(decode=FakeEngine("decode", connector=False)) as stack:
        got = await stack.chat("hi", n=choices)
        assert "kv_transfer_params" not in json.loads(got.body)
        assert b"10.0.0.9" not in got.body


async def test_decodes_length_and_encoding_are_not_copied(stack: RouterStack) -> None:
    document: dict[str, Any] = {"id": "x", "kv_transfer_params": None, "choices": []}
    headers = {"x-ratelimit-remaining-requests": "3", "server": "uvicorn"}
    stack.decode.then(answer(document, headers))
    got = await stack.chat("hi")
    assert json.loads(got.body) == {"id": "x", "choices": []}
    assert int(got.headers["content-length"]) == len(got.body)
    assert got.headers["x-ratelimit-remaining-requests"] == "3"


async def test_a_chat_without_capacity_is_a_503(stack: RouterStack) -> None:
    await stack.lose(stack.decode)
    await stack.add(FakeEngine("decode"), state=1)
    got = await stack.post(CHAT, chat_body("hi"))
    assert got.status == 503
    assert got.headers["retry-after"] == "1"
