"""Token counts that reach the client: the prompt's from prefill, the answer's from decode, nothing twice."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.grpc_client import open_channel
from tests.fakes.engine import FakeEngine, chunk_of, event_of, raw_stream, refuse
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack

ASKED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
PREFILL = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
DECODE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 99},
}
RIGHT = {**DECODE, "prompt_tokens_details": {"cached_tokens": 16}}
"""What the client should be told."""


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        stack.prefill.usage, stack.decode.usage = PREFILL, DECODE
        stack.prefill.verdict = {"prompt": 100, "local": 16}
        yield stack


def stream_of(engine: FakeEngine, **usage: Any) -> Any:
    """A stream with token counts at its end, as vLLM sends it when it is asked for them."""
    return raw_stream(engine, [event_of("Hel"), event_of("lo"), chunk_of(choices=[], usage={**DECODE, **usage})])


def events_in(body: bytes) -> list[Any]:
    data = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    assert data[-1] == b"[DONE]"
    return [json.loads(item) for item in data[:-1]]


def usages_in(body: bytes) -> list[Any]:
    return [event["usage"] for event in events_in(body) if "usage" in event]


async def test_a_whole_answer_counts_the_prompt_as_prefill_did(stack: RouterStack) -> None:
    got = json.loads((await stack.chat("hi")).body)
    assert got["usage"] == RIGHT
    assert got["choices"][0]["message"]["content"] == "Hello there"


async def test_a_completion_does_so_too(stack: RouterStack) -> None:
    got = await stack.post("/v1/completions", {"model": "tiny", "prompt": "once"})
    assert json.loads(got.body)["usage"] == RIGHT


async def test_a_stream_ends_with_the_same_counts_and_is_otherwise_untouched(stack: RouterStack) -> None:
    stack.decode.then(stream_of(stack.decode))
    got = await stack.chat("hi", **ASKED)
    assert usages_in(got.body) == [RIGHT]
    assert got.body.startswith(event_of("Hel") + event_of("lo"))
    assert [event["choices"] for event in events_in(got.body)][-1] == []


async def test_grpc_tells_the_same(stack: RouterStack) -> None:
    stack.decode.then(stream_of(stack.decode))
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        request = router_pb2.ChatCompletionsRequest(body=json.dumps(chat_body("hi", **ASKED)).encode())
        steps = [step async for step in stub.ChatCompletions(request, timeout=5)]
    assert usages_in(b"".join(step.chunk for step in steps)) == [RIGHT]


async def test_counts_in_every_event_are_left_alone_for_they_tell_nothing_wrong(stack: RouterStack) -> None:
    so_far = {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101}
    event = chunk_of(choices=[{"index": 0, "delta": {"content": "Hel"}, "finish_reason": None}], usage=so_far)
    stack.decode.then(raw_stream(stack.decode, [event, chunk_of(choices=[], usage=DECODE)]))
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = await stack.chat("hi", stream=True, stream_options=options)
    assert got.body.startswith(event)
    assert usages_in(got.body) == [so_far, RIGHT]


async def test_without_being_asked_nothing_is_counted_and_nothing_touched(stack: RouterStack) -> None:
    got = await stack.chat("hi", stream=True)
    assert got.body == b"".join(map(event_of, stack.decode.text)) + b"data: [DONE]\n\n"
    assert "stream_options" not in stack.decode.legs[0].body


async def test_a_decode_engine_that_computed_the_prompt_itself_is_believed() -> None:
    async with router_stack() as stack:
        stack.decode.usage = DECODE
        stack.prefill.then(refuse(503))
        got = await stack.chat("hi")
        assert got.headers["x-backhaul-fallback"] == "decode"
        assert json.loads(got.body)["usage"] == DECODE


async def test_what_the_prefill_engine_does_not_count_its_connector_does(stack: RouterStack) -> None:
    stack.prefill.usage = {"prompt_tokens": 100}
    stack.prefill.verdict = {"prompt": 100, "local": 32, "read": 48}
    got = json.loads((await stack.chat("hi")).body)
    assert got["usage"]["prompt_tokens_details"] == {"cached_tokens": 80}


async def test_what_nobody_counted_is_not_told() -> None:
    async with router_stack(prefill=FakeEngine("prefill", connector=False)) as stack:
        stack.decode.usage = DECODE
        usage = json.loads((await stack.chat("hi")).body)["usage"]
        assert usage["prompt_tokens_details"] is None
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (200, 7, 207)


@pytest.mark.parametrize("asked", [True, False])
async def test_the_usage_event_is_there_when_it_was_asked_for_and_only_then(stack: RouterStack, asked: bool) -> None:
    """A decode engine sends it when it is asked, and it is asked by the client alone."""
    if asked:
        stack.decode.then(stream_of(stack.decode))
    got = await stack.post(CHAT, chat_body("hi", **(ASKED if asked else {"stream": True})))
    assert len(usages_in(got.body)) == int(asked)
    assert ("stream_options" in stack.decode.legs[0].body) is asked
