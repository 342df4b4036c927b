"""Requests of every kind and their ids: what the engines are sent, what the client gets back."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.grpc_client import open_channel
from tests.fakes.engine import FakeEngine, Leg, answer, event_of, raw_stream, refuse
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


def params_of(leg: Leg) -> dict[str, Any]:
    assert leg.params is not None
    return leg.params


# Handles


async def test_two_turns_carry_each_handle_to_its_own_engine(stack: RouterStack) -> None:
    """Prefill gets what decode retained and the flags to read and keep; decode gets what prefill answered now."""
    await stack.chat("hi", stream=True)
    stack.hold(tokens=128)
    stack.publish(label_key("hi"))
    stack.prefill.block_ids = [[41, 42]]
    assert (await stack.chat("hi", "hello", "more", stream=True)).route == "warm"
    warm, second = params_of(stack.prefill.legs[1]), params_of(stack.decode.legs[1])
    assert (warm["do_remote_decode"], warm["do_remote_prefill"]) == (True, False)
    assert warm["remote_engine_id"] == stack.decode.engine_id
    assert warm["remote_block_ids"] == [[7, 8]]
    assert (warm["remote_host"], warm["remote_port"], warm["remote_num_tokens"]) == ("127.0.0.1", 5601, 128)
    assert second["remote_engine_id"] == stack.prefill.engine_id
    assert second["remote_block_ids"] == [[41, 42]]
    assert second["remote_request_id"] == stack.prefill.handed_off[1]


async def test_engines_without_the_connector_are_said_to_reuse_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = FakeEngine("prefill", connector=False), FakeEngine("decode", connector=False)
    async with router_stack(prefill=prefill, decode=decode) as stack:
        said = ""

        def told() -> bool:
            nonlocal said
            said += "".join(capsys.readouterr())
            return "no turn can reuse blocks" in said

        await eventually(told)
        await stack.add(FakeEngine("prefill"))
        await stack.add(FakeEngine("decode"))
        await eventually(lambda: "turns can reuse blocks" in "".join(capsys.readouterr()))


# Kinds


@pytest.mark.parametrize(
    "prompt", [["alpha", "beta", "gamma"], [[1, 2], [3], [4]]], ids=["texts", "lists of token ids"]
)
async def test_several_prompts_are_one_request_to_one_engine(stack: RouterStack, prompt: Any) -> None:
    choices = [{"index": index, "text": name, "finish_reason": "length"} for index, name in enumerate("abc")]
    usage = {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
    stack.decode.then(answer({"choices": choices, "usage": usage}))
    got = json.loads((await stack.post(COMPLETIONS, {"model": "tiny", "prompt": prompt, "max_tokens": 4})).body)
    assert (got["choices"], got["usage"]) == (choices, usage)
    (leg,) = stack.decode.legs
    assert (leg.params, leg.body["prompt"]) == (None, prompt)
    assert stack.prefill.legs == []


async def test_a_list_of_token_ids_is_one_prompt(stack: RouterStack) -> None:
    assert (await stack.post(COMPLETIONS, {"model": "tiny", "prompt": [1, 2, 3]})).status == 200
    assert len(stack.prefill.legs) == 1
    assert params_of(stack.decode.legs[0])["remote_engine_id"] == stack.prefill.engine_id


async def test_several_choices_come_back_and_leave_nothing_for_the_session(stack: RouterStack) -> None:
    headers = {"x-session-id": "s2"}
    got = await stack.chat("hi", headers=headers, n=3, max_tokens=8)
    assert len(json.loads(got.body)["choices"]) == 3
    assert stack.decode.legs[0].body["n"] == 3
    assert stack.decode.legs[0].params is None
    assert (await stack.chat("hi", "hello", "more", headers=headers)).miss == "not_found"


@pytest.mark.parametrize("reply", [None, {}], ids=["null", "empty"])
async def test_a_picture_reaches_decode_byte_for_byte_even_when_nothing_was_handed_over(
    stack: RouterStack, reply: Any
) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo\u00e9=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, picture]}]
    stack.prefill.then(answer({"choices": [], "usage": {"prompt_tokens": 3}, "kv_transfer_params": reply}))
    got = await stack.post(CHAT, {"model": "tiny", "messages": messages})
    assert got.status == 200
    (leg,) = stack.decode.legs
    assert json.dumps(picture).encode() in leg.raw
    assert list(leg.params or {}) == ["backhaul"], "only the label"


@pytest.mark.parametrize(
    "limits",
    [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 9, "max_completion_tokens": 8}, {}],
    ids=["old name", "new name", "both", "neither"],
)
async def test_prefill_generates_one_token_whatever_the_client_asks_for(
    stack: RouterStack, limits: dict[str, Any]
) -> None:
    """The fake prefill engine refuses to generate more."""
    assert (await stack.chat("hi", **limits)).status == 200
    (leg,) = stack.decode.legs
    assert {name: value for name, value in leg.body.items() if name.startswith("max_")} == limits


async def test_usage_events_and_ends_pass_with_and_without_being_asked_for(stack: RouterStack) -> None:
    for fields in ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": True}):
        events = [b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n']
        if "stream_options" in fields:
            events.append(b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n')
        stack.decode.then(raw_stream(stack.decode, events))
        got = await stack.post(CHAT, {**chat_body("hi"), **fields})
        assert got.body == b"".join(events) + b"data: [DONE]\n\n"


# Ids


async def test_equal_ids_of_two_requests_at_once_disturb_nobody(stack: RouterStack) -> None:
    """The fake engines refuse an id that they have seen."""
    headers = {"x-request-id": "same"}
    got = await asyncio.gather(*[stack.chat("hi", headers=headers, request_id="same") for _ in range(4)])
    assert {(one.status, one.headers["x-request-id"]) for one in got} == {(200, "same")}
    legs = [*stack.prefill.legs, *stack.decode.legs]
    assert len({leg.headers["x-request-id"] for leg in legs}) == len(legs) == 8
    assert all("request_id" not in leg.body for leg in legs)


async def test_a_repetition_has_ids_of_its_own(stack: RouterStack) -> None:
    stack.decode.then(refuse(500))
    assert (await stack.chat("hi", headers={"x-request-id": "same"})).status == 200
    legs = [*stack.prefill.legs, *stack.decode.legs]
    assert len({leg.headers["x-request-id"] for leg in legs}) == len(legs) == 3


@pytest.mark.parametrize("given", ["a%0ab", "x" * 4096, "\u00e9", 'a" level=error "b', "../../x"])
async def test_no_id_forges_a_line_of_the_log_or_a_key(
    stack: RouterStack, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    got = await stack.chat("hi", headers={"x-request-id": given, "x-session-id": given[:500]})
    assert got.status == 200
    assert got.headers["x-request-id"] != given
    lines = "".join(capsys.readouterr()).splitlines()
    assert len([line for line in lines if "first_turn" in line]) == 1
    assert not any(given in line for line in lines)
    (lookup,) = stack.directory.lookups
    assert all(set(key) <= set("0123456789abcdef") for key in lookup.keys)


async def test_headers_beyond_all_measure_are_refused(stack: RouterStack) -> None:
    got = await stack.chat("hi", headers={"x-request-id": "x" * 20_000})
    assert got.status in (400, 431)
    assert stack.prefill.legs == []


# Events


@pytest.mark.parametrize("asked", [{}, {"stream_options": {"include_usage": True}}], ids=["plain", "usage asked for"])
@pytest.mark.parametrize("headers", [{}, {"x-session-id": "s"}], ids=["no session", "session"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_event_is_there_before_the_next_exists(
    stack: RouterStack, path: str, headers: dict[str, str], asked: dict[str, Any]
) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    body = {"model": "tiny", "stream": True, **prompt, **asked}
    async with stack.client.post(f"{stack.url}{path}", json=body, headers=headers) as response:
        assert await asyncio.wait_for(response.content.readuntil(b"\n\n"), 2) == event_of("Hel")
        stack.decode.chunk_gate.set()
        assert (await response.read()).endswith(b"[DONE]\n\n")


async def test_over_grpc_too(stack: RouterStack) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        body = json.dumps(chat_body("hi", stream=True)).encode()
        call = stub.ChatCompletions(router_pb2.ChatCompletionsRequest(body=body), timeout=5)
        steps = aiter(call)
        assert (await anext(steps)).WhichOneof("step") == "started"
        assert (await asyncio.wait_for(anext(steps), 2)).chunk == event_of("Hel")
        stack.decode.chunk_gate.set()
        assert [step.chunk async for step in steps][-1].endswith(b"[DONE]\n\n")
