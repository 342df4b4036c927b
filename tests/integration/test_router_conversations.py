"""Conversations that are over: what is retained for them is released, and nobody else's."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.clock import SystemClock
from backhaul_common.errors import FailedPreconditionError, UnavailableError
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_router.core.lookup import scope_of, session_key
from backhaul_router.core.salt import salt_for
from backhaul_router.owner_client import OwnerClient
from tests.fakes.eventually import eventually
from tests.fakes.owner import FakeOwner
from tests.fakes.router_stack import MODEL, RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key
from tests.unit.router.test_tenants import FILE

SESSION = session_key(b"trip")
CLUSTER_KEY = "k" * 32


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


def hold(stack: RouterStack, set_id: str, key: str = SESSION, **fields: Any) -> None:
    """Lets the owner hold a block set, and publishes it."""
    stack.hold(set_id)
    stack.publish(key, set_id, **fields)


async def delete(
    stack: RouterStack, session_id: str | bytes = "trip", query: str = "", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Ends a conversation over HTTP."""
    url = f"{stack.url}/v1/conversations/{quote(session_id, safe='')}{query}"
    async with stack.client.delete(url, headers=headers) as response:
        return response.status, await response.json()


async def end(stack: RouterStack, request: router_pb2.EndConversationRequest) -> router_pb2.EndConversationResponse:
    """Ends a conversation over gRPC."""
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        return await router_pb2_grpc.InferenceServiceStub(channel).EndConversation(request)


async def test_a_conversation_that_ends_keeps_nothing(stack: RouterStack) -> None:
    hold(stack, "set-1")
    hold(stack, "set-2")
    status, told = await delete(stack)
    assert status == 200
    assert told == {"id": "trip", "object": "conversation.deleted", "deleted": True, "released": 2, "deferred": 0}
    assert sorted(stack.owner.released_sets) == ["set-1", "set-2"]


async def test_other_conversations_keep_what_they_have(stack: RouterStack) -> None:
    hold(stack, "set-1", session_key(b"other"))
    status, told = await delete(stack)
    assert (status, told["released"]) == (200, 0)
    assert stack.owner.released_sets == []


async def test_ending_a_conversation_twice_is_no_error(stack: RouterStack) -> None:
    hold(stack, "set-1")
    await delete(stack)
    status, told = await delete(stack)
    assert (status, told["released"]) == (200, 0)


async def test_what_a_turn_is_reading_is_released_later(stack: RouterStack) -> None:
    hold(stack, "set-1")
    await stack.chat("hi", "hello", "more", headers={"x-session-id": "trip"})
    _, told = await delete(stack)
    assert (told["released"], told["deferred"]) == (0, 1)


async def test_what_nobody_can_find_after_a_restart_of_its_owner_is_released_later() -> None:
    async with router_stack(listed=False) as stack:
        await stack.directory.add(stack.decode, agent=stack.owner.address, fenced=True)
        await eventually(lambda: len(stack.router.table) == 1)
        scope = scope_of(model=MODEL, cache_salt="", tenant="")
        stack.owner.fenced = {(scope, SESSION): ["set-1"], (scope, session_key(b"other")): ["set-2"]}
        hold(stack, "set-3")
        _, told = await delete(stack)
        assert (told["released"], told["deferred"]) == (1, 1)
        stack.owner.refusal = UnavailableError("NIXL_STARTING", "not yet")
        assert (await delete(stack))[0] == 503


async def test_owners_that_can_be_found_are_asked_for_no_keys(stack: RouterStack) -> None:
    assert (await delete(stack))[1]["deferred"] == 0
    assert stack.owner.releases == 0


@pytest.mark.parametrize("session_id", ["a/b c", "ü", "%2F", "a?b"])
async def test_any_session_id_can_be_named_in_the_path(stack: RouterStack, session_id: str) -> None:
    hold(stack, "set-1", session_key(session_id.encode()))
    status, told = await delete(stack, session_id)
    assert (status, told["id"], told["released"]) == (200, session_id, 1)


async def test_a_session_id_that_is_no_text_can_be_named_byte_by_byte(stack: RouterStack) -> None:
    hold(stack, "set-1", session_key("café".encode("latin-1")))
    status, told = await delete(stack, "café".encode("latin-1"))
    assert (status, told["id"], told["released"]) == (200, "caf%E9", 1)


async def test_model_and_salt_say_which_turns_are_meant(stack: RouterStack) -> None:
    hold(stack, "set-1", scope=scope_of(model=MODEL, cache_salt="mine", tenant=""))
    assert (await delete(stack))[1]["released"] == 0
    assert (await delete(stack, query="?model=another&cache_salt=mine"))[1]["released"] == 0
    assert (await delete(stack, query=f"?model={MODEL}&cache_salt=mine"))[1]["released"] == 1


@pytest.mark.parametrize("query", ["?modle=x", "?model=a&model=b"])
async def test_odd_parameters_are_refused(stack: RouterStack, query: str) -> None:
    hold(stack, "set-1")
    status, told = await delete(stack, query=query)
    assert (status, told["error"]["type"]) == (400, "invalid_request_error")
    assert stack.owner.released_sets == []


async def test_a_session_id_that_is_too_long_is_refused(stack: RouterStack) -> None:
    assert (await delete(stack, "x" * 513))[0] == 400


async def test_conversations_are_only_deleted(stack: RouterStack) -> None:
    async with stack.client.get(f"{stack.url}/v1/conversations/trip") as response:
        assert (response.status, response.headers["allow"]) == (405, "DELETE")
    async with stack.client.delete(f"{stack.url}/v1/conversations/") as response:
        assert response.status == 404


async def test_the_registrys_absence_is_told(stack: RouterStack) -> None:
    stack.directory.failure = UnavailableError("ETCD_UNAVAILABLE", "no etcd")
    status, told = await delete(stack)
    assert (status, told["error"]["message"]) == (503, "the registry does not answer")


async def test_an_owners_failure_is_told_and_the_rest_is_released(stack: RouterStack) -> None:
    hold(stack, "set-1")
    stack.owner.refusal = UnavailableError("BUSY", "no")
    status, told = await delete(stack)
    assert (status, told["error"]["message"]) == (503, "not all block sets could be released")
    stack.owner.refusal = None
    assert (await delete(stack))[1]["released"] == 1


async def test_an_agent_without_nixl_is_named_with_the_remedy(stack: RouterStack) -> None:
    hold(stack, "set-1")
    stack.owner.refusal = FailedPreconditionError("NIXL_MISSING", "this agent runs without nixl")
    status, told = await delete(stack)
    assert (status, told["error"]["code"]) == (503, "no_nixl")
    assert "requirements-nixl.txt" in told["error"]["message"]


async def test_an_owner_that_leaves_before_it_answers_is_an_error_like_any_other() -> None:
    async with FakeOwner() as owner, OwnerClient(clock=SystemClock()) as client:
        owner.silent = True
        asking = asyncio.create_task(client.release_sets(owner.address, ["set-1"], timeout_s=30))
        await eventually(lambda: owner.releases == 1)
        await client.forget([owner.address])
        with pytest.raises(UnavailableError):
            await asking


async def test_sets_of_a_node_that_is_gone_count_for_nothing(stack: RouterStack) -> None:
    stack.publish(SESSION, "set-1", scope="")
    await stack.directory.remove(f"decode-{stack.decode.port}")
    assert (await delete(stack))[1]["released"] == 0


async def test_over_grpc_the_last_body_names_a_conversation_without_an_id(stack: RouterStack) -> None:
    hold(stack, "set-1", label_key("hi", "hello", "more"))
    body = json.dumps(chat_body("hi", "hello", "more")).encode()
    ended = await end(stack, router_pb2.EndConversationRequest(body=body))
    assert (ended.released_count, ended.deferred_count) == (1, 0)


async def test_over_grpc_a_session_id_will_do(stack: RouterStack) -> None:
    hold(stack, "set-1")
    assert (await end(stack, router_pb2.EndConversationRequest(session_id="trip"))).released_count == 1


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        (router_pb2.EndConversationRequest(), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (router_pb2.EndConversationRequest(body=b"{"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (router_pb2.EndConversationRequest(session_id="x" * 513), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    ],
    ids=["nothing", "no body", "a long id"],
)
async def test_over_grpc_bad_requests_are_typed_errors(
    stack: RouterStack, request_: router_pb2.EndConversationRequest, code: grpc.StatusCode, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await end(stack, request_)
    assert (caught.value.code(), to_error(caught.value).reason) == (code, reason)


async def test_a_tenant_ends_only_its_own_conversations(tmp_path: Path) -> None:
    (tmp_path / "tenants").write_text(FILE)
    (tmp_path / "key").write_text(CLUSTER_KEY)
    tenants, key = str(tmp_path / "tenants"), str(tmp_path / "key")
    async with router_stack(tenants_file=tenants, cluster_key_file=key) as stack:
        salt = salt_for(CLUSTER_KEY.encode(), tenant="red", client_salt="")
        hold(stack, "set-1", scope=scope_of(model=MODEL, cache_salt=salt, tenant="red"))
        assert (await delete(stack))[0] == 401
        status, told = await delete(stack, headers={"authorization": "Bearer blue-1"})
        assert (status, told["released"]) == (200, 0)
        _, told = await delete(stack, headers={"authorization": "Bearer red-1"})
        assert told["released"] == 1
