"""Tenants on a running router: nothing tells one of another's conversations, and the file with them can change."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from backhaul.envoy.v3 import ext_proc_pb2 as pb
from backhaul.envoy.v3 import ext_proc_pb2_grpc
from backhaul.router.v1 import conversation_pb2, conversation_pb2_grpc, router_pb2, router_pb2_grpc
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_router.core.lookup import scope_of, session_key
from backhaul_router.core.salt import salt_for
from tests.fakes.engine import FakeEngine, Leg
from tests.fakes.eventually import eventually
from tests.fakes.issuer import AUDIENCE, ISSUER, key_set, token
from tests.fakes.router_stack import CHAT, MODEL, Got, RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key
from tests.unit.router.test_tenants import FILE, digest

CLUSTER_KEY = b"k" * 32
TURN = ("hi", "Hello there", "more")
"""What goes on with the conversation that is asked about."""


def settings(folder: Path, text: str = FILE) -> dict[str, Any]:
    """Writes the files; returns the router's settings."""
    (folder / "tenants.toml").write_text(text)
    (folder / "key").write_bytes(CLUSTER_KEY)
    (folder / "jwks.json").write_bytes(key_set())
    return {"tenants_file": str(folder / "tenants.toml"), "cluster_key_file": str(folder / "key")}


# What one tenant learns of another's conversations


@asynccontextmanager
async def world(folder: Path, opening: str, session_id: str) -> AsyncIterator[RouterStack]:
    """A router on which ``red`` has had one turn, in a conversation of which everything is still there."""
    prefill, decode = FakeEngine("prefill", engine_id="pe"), FakeEngine("decode", engine_id="de")
    options = {**settings(folder), "explain": True, "listen_ext_proc": "127.0.0.1:0"}
    async with router_stack(prefill=prefill, decode=decode, listed=False, **options) as stack:
        await stack.directory.add(prefill, agent=stack.owner.address, node_id="p")
        await stack.directory.add(decode, agent=stack.owner.address, node_id="d", second_chance=True, fenced=True)
        await eventually(lambda: len(stack.router.table) == 2)
        await stack.chat(opening, headers={"authorization": "Bearer red-1", "x-session-id": session_id})
        scope = scope_of(model=MODEL, cache_salt=salt_for(CLUSTER_KEY, tenant="red", client_salt=""), tenant="red")
        key = session_key(session_id.encode())
        stack.hold()
        stack.owner.fenced = {(scope, key): ["set-2"]}
        for known in (key, label_key(opening)):
            where: dict[str, Any] = {"scope": scope, "node_id": "d", "engine_id": "de"}
            stack.directory.publish(known, set_id="set-1", **where)
            stack.directory.publish(known, set_id="cached", cached=True, **where)
        stack.directory.lookups.clear()
        stack.owner.claims.clear()
        for engine in (prefill, decode):
            engine.legs.clear()
        yield stack


def work_of(stack: RouterStack) -> list[Any]:
    """Returns all that a router has asked others for, less what is random."""
    owner = stack.owner
    return [
        [(each.scope, tuple(each.keys)) for each in stack.directory.lookups],
        [(each.scope, each.set_id) for each in owner.claims],
        [(each.scope, each.set_id) for each in owner.harvests],
        (owner.releases, [*owner.released_sets], [*owner.returned], [*owner.released]),
        *([_told(leg) for leg in engine.legs] for engine in (stack.prefill, stack.decode)),
        *([*engine.tokenized] for engine in (stack.prefill, stack.decode)),
    ]


def _told(leg: Leg) -> tuple[str, dict[str, Any]]:
    """Returns what a leg asks for, without the name of its trace."""
    params = leg.params or {}
    label = {name: value for name, value in params.get("backhaul", {}).items() if name != "traceparent"}
    named = {"backhaul": label, "blocks": params.get("remote_block_ids")}
    return leg.path, {**leg.body, "kv_transfer_params": named}


def told(headers: Any) -> dict[str, str]:
    """Returns the headers that say how a turn was served, without times."""
    return {name.lower(): value for name, value in headers.items() if name.lower().startswith("x-backhaul-")}


Ask = Callable[[RouterStack, str], Awaitable[Any]]


async def over_http(stack: RouterStack, key: str) -> Any:
    got = await stack.chat(*TURN, stream=True, headers={"authorization": f"Bearer {key}", "x-session-id": "trip"})
    return got.status, told(got.headers), got.body


async def by_its_messages(stack: RouterStack, key: str) -> Any:
    got = await stack.chat(*TURN, headers={"authorization": f"Bearer {key}"})
    return got.status, told(got.headers), got.body


async def over_grpc(stack: RouterStack, key: str) -> Any:
    body = json.dumps(chat_body(*TURN)).encode()
    request = router_pb2.ChatCompletionsRequest(body=body, session_id="trip")
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        return [step async for step in stub.ChatCompletions(request, timeout=10, metadata=bearer(key))]


async def through_a_gateway(stack: RouterStack, key: str) -> Any:
    """Has the picker prepare a decode leg, and tells it of an answer that nobody gave."""
    asked = {":method": "POST", ":path": CHAT, "content-type": "application/json", "x-session-id": "trip"}
    first = pb.ProcessingRequest(request_headers=_headers({**asked, "authorization": f"Bearer {key}"}))
    first.protocol_config.request_body_mode = pb.BUFFERED
    body = pb.HttpBody(body=json.dumps(chat_body(*TURN, stream=True)).encode(), end_of_stream=True)
    answered = _headers({":status": "200", "content-type": "text/event-stream"})
    async with open_channel(f"127.0.0.1:{stack.router.ext_proc_port}") as channel:
        # The stubs know the requests alone.
        call: Any = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
        await call.write(first)
        if (answer := await call.read()).HasField("immediate_response"):
            return [answer.immediate_response.status.code]
        await call.write(pb.ProcessingRequest(request_body=body))
        leg = json.loads((await call.read()).request_body.response.body_mutation.body)
        await call.write(pb.ProcessingRequest(response_headers=answered))
        head = (await call.read()).response_headers.response.header_mutation.set_headers
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
    return _told(Leg(CHAT, {}, leg, b"")), told({each.header.key: each.header.raw_value for each in head})


def _headers(values: dict[str, str]) -> pb.HttpHeaders:
    headers = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in values.items()]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=headers))


async def by_explain(stack: RouterStack, key: str) -> Any:
    request = router_pb2.ExplainRequest(
        body=json.dumps(chat_body(*TURN)).encode(), session_id="trip", api=router_pb2.API_CHAT_COMPLETIONS
    )
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        answer = await stub.Explain(request, timeout=10, metadata=bearer(key))
    for way in answer.ways:
        # What engines have been seen to take.
        way.ClearField("estimate")
    answer.ClearField("legs")
    return answer


async def by_finding(stack: RouterStack, key: str) -> Any:
    request = conversation_pb2.FindConversationRequest(session_id="trip")
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = conversation_pb2_grpc.ConversationServiceStub(channel)
        return await stub.FindConversation(request, timeout=10, metadata=bearer(key))


async def by_delete(stack: RouterStack, key: str) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    async with stack.client.delete(f"{stack.url}/v1/conversations/trip", headers=headers) as response:
        return response.status, await response.json()


async def by_its_last_body(stack: RouterStack, key: str) -> Any:
    request = router_pb2.EndConversationRequest(body=json.dumps(chat_body("hi")).encode(), session_id="trip")
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        return await stub.EndConversation(request, timeout=20, metadata=bearer(key))


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.mark.parametrize(
    "ask",
    [over_http, by_its_messages, over_grpc, through_a_gateway, by_explain, by_finding, by_delete, by_its_last_body],
    ids=lambda ask: ask.__name__,
)
async def test_what_is_asked_answered_and_done_is_the_same_whether_or_not_another_tenant_has_the_conversation(
    tmp_path: Path, ask: Ask
) -> None:
    others, own = [], []
    for opening, session_id in (("hi", "trip"), ("ho", "trap")):
        async with world(tmp_path, opening, session_id) as stack:
            others.append((await ask(stack, "blue-1"), work_of(stack)))
            own.append(await ask(stack, "red-1"))
    assert others[0] == others[1]
    # ... and it would show: its own tenant sees the difference.
    assert own[0] not in (own[1], others[0][0])


@pytest.mark.parametrize("ask", [over_http, through_a_gateway, by_delete], ids=lambda ask: ask.__name__)
async def test_who_is_nobody_is_refused_before_anything_is_done(tmp_path: Path, ask: Ask) -> None:
    async with world(tmp_path, "hi", "trip") as stack:
        before = work_of(stack)
        for key in ("green-1", "", token()):
            assert (await ask(stack, key))[0] == 401
        assert work_of(stack) == before


# The file changes


class Files:
    """The files of a router that runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, text: str) -> None:
        (self._folder / "tenants.toml").write_text(text)


async def status_of(stack: RouterStack, key: str) -> int:
    async with stack.client.get(f"{stack.url}/v1/models", headers={"authorization": f"Bearer {key}"}) as response:
        return response.status


async def test_a_tenant_that_is_gone_is_refused_while_its_turn_goes_on_and_what_is_broken_changes_nothing(
    tmp_path: Path,
) -> None:
    files = Files(tmp_path)
    async with router_stack(max_turns=1, max_queued=1, **settings(tmp_path)) as stack:
        stack.decode.chunk_gate = asyncio.Event()
        headers = {"authorization": "Bearer red-1"}
        runs = asyncio.create_task(stack.chat("hi", stream=True, headers=headers))
        await eventually(lambda: len(stack.decode.legs) == 1)
        waits: asyncio.Task[Got] = asyncio.create_task(stack.chat("ho", headers=headers))
        await eventually(lambda: stack.router.admission.queued_count == 1)
        with capture_logs() as logs:
            files.write("[tenants.red]\nkeys = ['red-1']")
            await eventually(lambda: "tenants file cannot be used" in str(logs), timeout_s=20)
        assert await status_of(stack, "blue-1") == 200
        files.write(f'[tenants.green]\nkey_sha256 = ["{digest("green-1")}"]')
        await eventually(lambda: _is(stack, "green-1", 200), timeout_s=20)
        assert [await status_of(stack, key) for key in ("red-1", "blue-1")] == [401, 401]
        stack.decode.chunk_gate.set()
        done = await runs
        assert (done.status, done.body.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert (await waits).status == 401
        assert len(stack.decode.legs) == 1


async def _is(stack: RouterStack, key: str, status: int) -> bool:
    return await status_of(stack, key) == status


# Tokens


async def test_a_token_is_as_good_as_a_key_and_reaches_neither_engine_nor_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jwt = f'[jwt]\nissuer = "{ISSUER}"\naudience = ["{AUDIENCE}"]\nkeys_file = "jwks.json"\n'
    given = token()
    async with router_stack(**settings(tmp_path, jwt + FILE + '\njwt_names = ["red-app"]')) as stack:
        assert (await stack.chat("hi", headers={"authorization": f"Bearer {given}"})).status == 200
        assert len(await over_grpc(stack, given)) > 1
        assert (await stack.chat("hi", headers={"authorization": f"Bearer {token(key='another')}"})).status == 401
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await over_grpc(stack, token(kid="two"))
        assert to_error(caught.value).reason == "INVALID_API_KEY"
        legs = [*stack.prefill.legs, *stack.decode.legs]
        # The same tenant as by its key: the same salt.
        await stack.chat("hi", headers={"authorization": "Bearer blue-1"})
        assert {leg.body["cache_salt"] for leg in legs} == {stack.decode.legs[-1].body["cache_salt"]}
    sent = str([(leg.headers, leg.body) for leg in legs]) + "".join(capsys.readouterr())
    assert not [part for part in given.split(".") if part in sent]
