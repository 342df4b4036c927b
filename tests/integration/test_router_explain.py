"""What a router tells of its choices, over HTTP and gRPC, and to whom."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.grpc_client import open_channel, to_error
from tests.fakes.engine import FakeEngine
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import Got, RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key

ON = {"x-backhaul-explain": "on"}
SECRET = "the launch code is 7355608"
CHAT = router_pb2.API_CHAT_COMPLETIONS


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(explain=True, body_limit=20_000) as stack:
        yield stack


def told(got: Got) -> Any:
    return json.loads(got.headers["x-backhaul-explain"])


async def ask(
    stack: RouterStack,
    *contents: str,
    api: "router_pb2.Api.ValueType" = CHAT,
    body: bytes | None = None,
    key: str = "",
    **fields: Any,
) -> router_pb2.ExplainResponse:
    """Asks how a chat turn would be served."""
    body = json.dumps(chat_body(*contents, **fields)).encode() if body is None else body
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        request = router_pb2.ExplainRequest(body=body, api=api)
        return await router_pb2_grpc.InferenceServiceStub(channel).Explain(request, timeout=10, metadata=metadata)


async def refusal(stack: RouterStack, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stack, **options)
    return caught.value.code(), to_error(caught.value).reason


def hold(stack: RouterStack) -> None:
    """Has the decode engine hold what the turn `hi` left."""
    stack.hold(tokens=128)
    stack.publish(label_key("hi"))


def prefer(route: str) -> dict[str, Any]:
    return {"explain": True, "prefer": route}


# In the header


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cold_answer_says_why_it_is_cold(stack: RouterStack, stream: bool) -> None:
    got = await stack.chat("hi", stream=stream, headers=ON)
    assert got.route == "cold"
    assert (told(got)["route"], told(got)["miss"]) == ("cold", "first_turn")
    assert [(way["route"], way["reason"]) for way in told(got)["ways"][:2]] == [
        ("append", "not_found"),
        ("warm", "not_found"),
    ]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ["warm", "append"])
async def test_an_answer_that_reuses_says_by_what_estimate(route: str, stream: bool) -> None:
    async with router_stack(**prefer(route)) as stack:
        hold(stack)
        got = await stack.chat("hi", "hello", "more", stream=stream, headers=ON)
    explained = told(got)
    assert got.route == explained["route"] == route
    assert (explained["miss"], explained["held_tokens"]) == ("", 128)
    [way] = [way for way in explained["ways"] if way.get("chosen")]
    assert way["route"] == route
    assert bool(way["prefill"]) is (route == "warm")
    assert way["decode"].startswith("decode-")
    assert way["ms"]["total"] > 0


async def test_by_estimate_all_ways_are_in_it() -> None:
    async with router_stack(**prefer("auto")) as stack:
        hold(stack)
        got = await stack.chat("hi", "hello", "more", headers=ON)
    assert got.route == told(got)["route"]
    assert {way["route"] for way in told(got)["ways"] if "ms" in way} == {"append", "warm", "cold"}


@pytest.mark.parametrize("headers", [{}, {"x-backhaul-explain": "off"}, {"x-backhaul-explain": "yes"}], ids=str)
async def test_who_does_not_ask_is_told_nothing(stack: RouterStack, headers: dict[str, str]) -> None:
    got = await stack.chat("hi", headers=headers)
    assert got.status == 200
    assert "x-backhaul-explain" not in got.headers


async def test_with_many_nodes_the_header_stays_short(stack: RouterStack) -> None:
    for number in range(200):
        engine = FakeEngine("prefill")
        engine.port = 8200
        node_id = f"{number}-" + "n" * 200
        await stack.directory.add(engine, node_id=node_id, compatibility_hash=f"another-{number}")
    await eventually(lambda: len(stack.router.table) == 202)
    got = await stack.chat("hi", headers=ON)
    assert got.route == told(got)["route"] == "cold"
    assert len(got.headers["x-backhaul-explain"]) <= 6 * 1024


# By gRPC


async def test_a_question_shows_what_a_turn_could_do_and_claims_and_sends_nothing(stack: RouterStack) -> None:
    hold(stack)
    answer = await ask(stack, "hi", "hello", "more")
    assert (answer.route, answer.miss_reason, answer.held_token_count) == ("warm", "", 128)
    assert answer.holder_node_id == f"decode-{stack.decode.port}"
    assert [(way.route, way.reason, way.chosen) for way in answer.ways[:2]] == [
        ("append", "route_off", False),
        ("warm", "", True),
    ]
    assert {leg.leg for leg in answer.legs} >= {"read", "prefill", "decode"}
    assert all(leg.picked for leg in answer.legs)
    assert (stack.prefill.legs, stack.decode.legs) == ([], [])
    assert (stack.prefill.tokenized, stack.decode.tokenized) == ([], [])
    assert stack.owner.claims == []


async def test_the_turn_then_goes_as_was_said() -> None:
    async with router_stack(**prefer("auto")) as stack:
        hold(stack)
        answer = await ask(stack, "hi", "hello", "more")
        assert (await stack.chat("hi", "hello", "more")).route == answer.route


async def test_a_completion_is_asked_about_as_such(stack: RouterStack) -> None:
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3]}).encode()
    answer = await ask(stack, body=body, api=router_pb2.API_COMPLETIONS)
    assert (answer.route, answer.miss_reason, answer.prompt_token_count) == ("cold", "no_keys", 3)


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        ({"api": router_pb2.API_UNSPECIFIED}, grpc.StatusCode.INVALID_ARGUMENT, "API"),
        ({"api": 77}, grpc.StatusCode.INVALID_ARGUMENT, "API"),
        ({"body": b"{"}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ({"body": b""}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ({"model": "unknown"}, grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
        ({"body": b"x" * 20_001}, grpc.StatusCode.RESOURCE_EXHAUSTED, "BODY_LIMIT"),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(
    stack: RouterStack, options: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    assert await refusal(stack, **options) == (code, reason)


# Who is told


async def test_by_default_nobody_is_told() -> None:
    async with router_stack() as stack:
        got = await stack.chat("hi", headers=ON)
        assert got.status == 200
        assert "x-backhaul-explain" not in got.headers
        assert await refusal(stack) == (grpc.StatusCode.FAILED_PRECONDITION, "EXPLAIN_OFF")


async def test_tenants_are_told_and_nobody_else(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"red-1").hexdigest()
    (tmp_path / "tenants.toml").write_text(f'[tenants.red]\nkey_sha256 = ["{digest}"]')
    (tmp_path / "key").write_bytes(b"k" * 32)
    files: dict[str, Any] = {"tenants_file": str(tmp_path / "tenants.toml"), "cluster_key_file": str(tmp_path / "key")}
    async with router_stack(explain=True, **files) as stack:
        for key in ("", "blue-1"):
            code, _ = await refusal(stack, key=key)
            assert code is grpc.StatusCode.UNAUTHENTICATED
        assert (await ask(stack, "hi", key="red-1")).route == "cold"
        headers = {**ON, "authorization": "Bearer red-1"}
        assert told(await stack.chat("hi", headers=headers))["route"] == "cold"
        assert (await stack.chat("hi", headers={**ON, "authorization": "Bearer blue-1"})).status == 401


async def test_nothing_is_told_of_addresses_handles_or_what_was_said() -> None:
    prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
    async with router_stack(prefill=prefill, decode=decode, listed=False, explain=True, prefer="warm") as stack:
        await stack.directory.add(prefill, agent=stack.owner.address, node_id="left")
        await stack.directory.add(decode, agent=stack.owner.address, node_id="right")
        await eventually(lambda: len(stack.router.table) == 2)
        stack.hold(tokens=128)
        stack.directory.publish(
            label_key(SECRET), set_id="set-1", node_id="right", engine_id=decode.engine_id, digest=b"d" * 16
        )
        got = await stack.chat(SECRET, "hello", "more", headers=ON)
        answer = await ask(stack, SECRET, "hello", "more")
    assert got.route == answer.route == "warm"
    secrets = ["127.0.0.1", str(prefill.port), str(decode.port), decode.engine_id, "set-1", "launch", label_key(SECRET)]
    for text in (got.headers["x-backhaul-explain"], str(answer)):
        assert "left" in text
        assert not [secret for secret in secrets if secret in text]
