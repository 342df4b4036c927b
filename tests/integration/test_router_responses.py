"""`/v1/responses` and `/v1/messages` over real sockets: lookups, names of responses, broken streams."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from backhaul.registry.v1 import registry_pb2
from backhaul_router import instruments
from backhaul_router.core.body import Endpoint, parse_body
from backhaul_router.core.lookup import keys_of, response_key
from tests.fakes.engine import FakeEngine, break_after, raw_stream, refuse
from tests.fakes.eventually import eventually
from tests.fakes.other_forms import named, response_events
from tests.fakes.readings import Readings
from tests.fakes.router_stack import CHAT, MODEL, Got, RouterStack, router_stack
from tests.unit.router.test_tenants import FILE

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USAGE = {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201}
TURNS = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(idle_timeout_s=0.5) as stack:
        yield stack


@pytest.fixture
async def hasty() -> AsyncIterator[RouterStack]:
    """Whose router does not wait long for what nobody here publishes."""
    async with router_stack(lookup_budget_s=0.05) as stack:
        yield stack


def body_of(path: str, *contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    shape: dict[str, Any] = {"input": said} if path == RESPONSES else {"messages": said, "max_tokens": 50}
    return {"model": MODEL, **shape, **fields}


def key_of(path: str, *contents: str) -> str:
    """Returns the chain key under which a turn is labelled."""
    return keys_of(parse_body(Endpoint(path), msgspec.json.encode(body_of(path, *contents))), None).own


async def respond(stack: RouterStack, given: Any = "hi", **fields: Any) -> Got:
    return await stack.post(RESPONSES, {"model": MODEL, "input": given, **fields})


def labels(stack: RouterStack) -> list[list[str]]:
    """Returns the keys with which the decode engine was told to label its turns."""
    return [(leg.params or {})["backhaul"]["keys"] for leg in stack.decode.legs]


# Both


@TURNS
async def test_a_first_turn_is_cold_over_both_engines_and_labelled_for_the_next(stack: RouterStack, path: str) -> None:
    got = await stack.post(path, body_of(path, "hi", stream=True))
    assert (got.status, got.route, got.miss) == (200, "cold", "first_turn")
    assert "x-backhaul-reuse" not in got.headers
    assert labels(stack)[0][0] == key_of(path, "hi")
    assert [leg.path for leg in (*stack.prefill.legs, *stack.decode.legs)] == [path, path]
    assert (stack.decode.legs[0].params or {})["remote_engine_id"] == stack.prefill.engine_id


@TURNS
@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_reads_what_the_first_left(stack: RouterStack, path: str, stream: bool) -> None:
    stack.hold(tokens=128)
    stack.publish(key_of(path, "hi"))
    got = await stack.post(path, body_of(path, "hi", "hello", "more", stream=stream))
    assert (got.status, got.route, got.miss) == (200, "warm", "")
    assert got.headers["x-backhaul-read-tokens"] == "128"
    assert b"Hel" in got.body
    assert b"kv_transfer_params" not in got.body


@TURNS
async def test_reuse_can_be_switched_off_and_the_answer_says_so(stack: RouterStack, path: str) -> None:
    got = await stack.post(path, body_of(path, "hi"), {"x-backhaul-reuse": "off"})
    assert (got.route, got.miss, got.headers["x-backhaul-reuse"]) == ("cold", "reuse_off", "off")
    assert "backhaul" not in (stack.decode.legs[0].params or {}) or labels(stack) == [[]]


@TURNS
async def test_a_decode_engine_that_fails_before_it_speaks_is_asked_again(stack: RouterStack, path: str) -> None:
    begun = response_events({"model": MODEL}, ["x"], USAGE)[:2]
    error = named({"type": "error", "error": {"type": "internal_error", "message": "no"}})
    failing = break_after(begun) if path == RESPONSES else raw_stream(stack.decode, [error], done=False)
    stack.decode.then(failing)
    got = await stack.post(path, body_of(path, "hi", stream=True))
    assert got.status == 200
    assert b"Hel" in got.body
    assert len(stack.decode.legs) == 2


@TURNS
async def test_a_stream_that_breaks_ends_with_an_error_event(stack: RouterStack, path: str) -> None:
    if path == RESPONSES:
        events = response_events({"model": MODEL}, ["x"], USAGE)[:5]
    else:
        events = [named({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}})]
    stack.decode.then(break_after(events))
    got = await stack.post(path, body_of(path, "hi", stream=True))
    *_, last, rest = got.body.split(b"\n\n")
    assert (rest, last.split(b"\n")[0]) == (b"", b"event: error")
    assert json.loads(last.split(b"data: ")[1])["error"]["code"] == "engine_failed"


async def test_errors_of_messages_are_in_anthropics_form(stack: RouterStack) -> None:
    mine = json.loads((await stack.post(MESSAGES, {"model": MODEL})).body)
    stack.prefill.then(refuse(400, "bad block"))
    theirs = json.loads((await stack.post(MESSAGES, body_of(MESSAGES, "hi"))).body)
    assert mine["type"] == theirs["type"] == "error"
    assert theirs["error"]["message"] == "bad block"


async def test_what_one_engine_must_serve_goes_to_decode_alone_and_says_that_reuse_is_off(stack: RouterStack) -> None:
    got = await respond(stack, tools=[{"type": "web_search_preview"}])
    assert (got.status, got.miss, got.headers["x-backhaul-reuse"]) == (200, "unsupported_request", "off")
    assert stack.prefill.legs == []
    assert stack.decode.legs[0].params is None


# Names of responses


async def test_a_turn_after_a_response_goes_to_the_engine_that_keeps_it(hasty: RouterStack) -> None:
    others = [await hasty.add(FakeEngine("decode")) for _ in range(2)]
    first = json.loads((await respond(hasty)).body)
    (keeper,) = [engine for engine in (hasty.decode, *others) if engine.stored]

    second = await respond(hasty, "more", previous_response_id=first["id"])

    assert second.status == 200
    assert keeper.legs[-1].body["previous_response_id"] == first["id"]
    assert len(hasty.prefill.legs) == 1
    assert keeper.legs[-1].params == {"backhaul": {"scope": keeper.legs[0].params["backhaul"]["scope"],  # type: ignore[index]  # labelled
        "keys": [response_key(json.loads(second.body)["id"])], "continues": [response_key(first["id"])]}}  # fmt: skip


async def test_a_turn_after_a_response_appends_where_its_blocks_are_held() -> None:
    async with router_stack(prefer="auto") as stack:
        name = json.loads((await respond(stack)).body)["id"]
        stack.hold(tokens=128)
        stack.publish(response_key(name), token_count=128)
        got = await respond(stack, "more", previous_response_id=name)
        assert (got.status, got.route, got.miss) == (200, "append", "")
        assert "x-backhaul-reuse" not in got.headers


async def test_without_blocks_the_keeper_computes_all_of_it(hasty: RouterStack) -> None:
    name = json.loads((await respond(hasty, stream=False)).body)["id"]
    got = await respond(hasty, "more", previous_response_id=name)
    assert (got.status, got.route) == (200, "cold")
    assert got.miss in ("not_found", "lookup_timeout")


async def test_every_response_has_a_name_of_its_own_that_says_nothing(stack: RouterStack) -> None:
    names = [json.loads((await respond(stack)).body)["id"] for _ in range(2)]
    assert len({*names}) == 2
    assert all(stack.decode.engine_id not in name and str(stack.decode.port) not in name for name in names)


async def test_a_streamed_response_can_be_gone_on_from_too(hasty: RouterStack) -> None:
    events = (await respond(hasty, stream=True)).body.split(b"\n\n")
    name = json.loads(events[0].split(b"data: ")[1])["response"]["id"]
    got = await respond(hasty, "more", previous_response_id=name, stream=True)
    assert got.status == 200
    assert hasty.decode.legs[-1].body["previous_response_id"] == name


@pytest.mark.parametrize("name", ["resp_1", "", "../health", "resp_" + "0" * 64])
async def test_an_unknown_response_is_refused_and_no_engine_is_asked(stack: RouterStack, name: str) -> None:
    got = await respond(stack, previous_response_id=name or "x")
    error = json.loads(got.body)["error"]
    assert (got.status, error["code"], error["param"]) == (404, "previous_response_not_found", "previous_response_id")
    assert stack.prefill.legs == stack.decode.legs == []


async def test_an_engine_that_keeps_nothing_is_told_apart(hasty: RouterStack) -> None:
    hasty.decode.stores = False
    name = json.loads((await respond(hasty)).body)["id"]
    got = await respond(hasty, "more", previous_response_id=name)
    error = json.loads(got.body)["error"]
    assert (got.status, error["code"]) == (404, "previous_response_not_found")
    assert "VLLM_ENABLE_RESPONSES_API_STORE" in error["message"]


async def test_a_keeper_that_takes_no_turns_is_not_replaced(stack: RouterStack) -> None:
    name = json.loads((await respond(stack)).body)["id"]
    await stack.add(FakeEngine("decode"))
    node = stack.directory.nodes[f"decode-{stack.decode.port}"]
    node.state = registry_pb2.NODE_STATE_NOT_READY
    await stack.directory.put(node)
    await eventually(lambda: not stack.router.table.known(node.node_id).ready)  # type: ignore[union-attr]  # is listed
    got = await respond(stack, "more", previous_response_id=name)
    assert (got.status, got.headers["retry-after"]) == (503, "1")


async def test_a_response_can_be_fetched_from_who_keeps_it(read: Readings, stack: RouterStack) -> None:
    await stack.add(FakeEngine("decode"))
    name = json.loads((await respond(stack)).body)["id"]
    async with stack.client.get(f"{stack.url}{RESPONSES}/{name}") as response:
        document = await response.json()
        assert (response.status, response.headers["x-backhaul-reuse"]) == (200, "off")
    assert document["id"] == name
    assert "kv_transfer_params" not in document
    assert read.counted(instruments.PASSED_ON) == {("/v1/responses/{id}",): 1}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", f"{RESPONSES}/resp_1", 404),
        ("GET", f"{RESPONSES}/resp_1?stream=true", 400),
        ("DELETE", f"{RESPONSES}/resp_1", 405),
        ("POST", f"{RESPONSES}/resp_1/cancel", 404),
        ("GET", f"{RESPONSES}/resp_1/input_items", 404),
    ],
)
async def test_other_requests_for_responses_are_refused(
    stack: RouterStack, method: str, path: str, status: int
) -> None:
    async with stack.client.request(method, f"{stack.url}{path}") as response:
        assert response.status == status
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_a_tenant_cannot_go_on_from_or_fetch_anothers_response(tmp_path: Path) -> None:
    tenants, key = tmp_path / "tenants.toml", tmp_path / "key"
    tenants.write_text(FILE)
    key.write_text("k" * 32)
    async with router_stack(tenants_file=str(tenants), cluster_key_file=str(key)) as stack:
        blue, red = ({"authorization": f"Bearer {secret}"} for secret in ("blue-1", "red-1"))
        first = await stack.post(RESPONSES, {"model": MODEL, "input": "hi"}, blue)
        assert first.status == 200, first.body
        name = json.loads(first.body)["id"]
        after = {"model": MODEL, "input": "more", "previous_response_id": name}
        assert (await stack.post(RESPONSES, after, red)).status == 404
        async with stack.client.get(f"{stack.url}{RESPONSES}/{name}", headers=red) as response:
            assert response.status == 404
        assert (await stack.post(RESPONSES, after, blue)).status == 200


# Clients


async def test_clients_of_messages_may_bring_their_key_in_anthropics_way(tmp_path: Path) -> None:
    tenants, key = tmp_path / "tenants.toml", tmp_path / "key"
    tenants.write_text(FILE)
    key.write_text("k" * 32)
    async with router_stack(tenants_file=str(tenants), cluster_key_file=str(key)) as stack:
        counted = f"{MESSAGES}/count_tokens"
        for path, body in ((MESSAGES, body_of(MESSAGES, "hi")), (counted, body_of(MESSAGES, "hi"))):
            assert (await stack.post(path, body, {"x-api-key": "blue-1"})).status == 200
            assert (await stack.post(path, body, {"x-api-key": "green-1"})).status == 401
            wrong = {"x-api-key": "blue-1", "authorization": "Bearer green-1"}
            assert (await stack.post(path, body, wrong)).status == 401
        assert (await stack.post(RESPONSES, body_of(RESPONSES, "hi"), {"x-api-key": "blue-1"})).status == 401


async def test_the_official_client(stack: RouterStack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="k", max_retries=0) as client:
        first = await client.responses.create(model=MODEL, input="hi")
        assert first.output_text == "Hello there"
        stream = await client.responses.create(model=MODEL, input="more", previous_response_id=first.id, stream=True)
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert text == "Hello there"
        stack.decode.then(break_after(response_events({"model": MODEL}, ["x"], USAGE)[:5]))
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        with pytest.raises(openai.APIError, match="decode engine failed"):
            [event async for event in stream]


async def test_a_chat_is_what_it_was(stack: RouterStack) -> None:
    got = await stack.chat("hi", stream=True)
    assert got.body.endswith(b"data: [DONE]\n\n")
    assert [leg.path for leg in stack.decode.legs] == [CHAT]
