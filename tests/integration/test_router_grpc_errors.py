"""Every RPC's errors say why in ErrorInfo, and when to ask again in RetryInfo where that is known."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_status import rpc_status

from backhaul.router.v1 import (
    conversation_pb2,
    conversation_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    http_pb2,
    http_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from backhaul_common.errors import UnavailableError
from backhaul_common.grpc_client import open_channel
from tests.apis import services
from tests.fakes.engine import hang, refuse
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import RouterStack, chat_body, router_stack

CHAT = json.dumps(chat_body("hi")).encode()
OTHER = json.dumps(chat_body("hi", model="other")).encode()
API = router_pb2.API_CHAT_COMPLETIONS
KEY, WRONG = (("authorization", "Bearer k"),), (("authorization", "Bearer other"),)


@dataclass(frozen=True)
class Told:
    """What an error says."""

    code: str
    reason: str
    retry_s: int | None = None


@dataclass
class Scene:
    """A router of one turn at once, whose gRPC services are called with a tenant's key."""

    stack: RouterStack
    channels: dict[str, grpc.aio.Channel]

    async def call(self, rpc: str, key: Any = KEY, **fields: Any) -> Any:
        """Calls an RPC by its name; returns its answers."""
        service, stub = STUBS[rpc]
        request = REQUESTS[rpc](**fields)
        call = getattr(stub(self.channels[service]), rpc)(request, timeout=10, metadata=key)
        return [answer async for answer in call] if isinstance(call, grpc.aio.UnaryStreamCall) else await call

    async def failure(self, rpc: str, **options: Any) -> Told:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(rpc, **options)
        return said(caught.value)


def said(error: grpc.aio.AioRpcError) -> Told:
    status = rpc_status.from_call(error)
    assert status is not None
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "backhaul"
    known = any(detail.Unpack(retry) for detail in status.details)
    return Told(error.code().name, info.reason, retry.retry_delay.seconds if known else None)


SERVICES: dict[str, Any] = {
    "ConversationService": conversation_pb2_grpc.ConversationServiceStub,
    "GatewayService": gateway_pb2_grpc.GatewayServiceStub,
    "HttpService": http_pb2_grpc.HttpServiceStub,
    "InferenceService": router_pb2_grpc.InferenceServiceStub,
}
STUBS: dict[str, tuple[str, Any]] = {
    method.name: (service.name, SERVICES[service.name])
    for service in services("backhaul.router")
    for method in service.methods
}


def http_body(body: bytes) -> HttpBody:
    return HttpBody(content_type="application/json", data=body)


def report(**fields: Any) -> gateway_pb2.ReportTurnRequest:
    return gateway_pb2.ReportTurnRequest(**{"left": gateway_pb2.ReportTurnRequest.Left(), **fields})


REQUESTS: dict[str, Callable[..., Any]] = {
    "ChatCompletions": lambda body=CHAT: router_pb2.ChatCompletionsRequest(body=body),
    "Completions": lambda body=CHAT: router_pb2.CompletionsRequest(body=body),
    "EndConversation": lambda body=b"": router_pb2.EndConversationRequest(body=body),
    "Explain": lambda body=CHAT, api=API: router_pb2.ExplainRequest(body=body, api=api),
    "ListModels": router_pb2.ListModelsRequest,
    "CreateChatCompletion": lambda body=CHAT: http_pb2.CreateChatCompletionRequest(body=http_body(body)),
    "CreateCompletion": lambda body=CHAT: http_pb2.CreateCompletionRequest(body=http_body(body)),
    "GetModels": http_pb2.GetModelsRequest,
    "DeleteConversation": lambda id="": http_pb2.DeleteConversationRequest(id=id),  # noqa: A006  # the field's name
    "FindConversation": lambda body=b"": conversation_pb2.FindConversationRequest(body=body),
    "PlanTurn": lambda body=CHAT, api=API: gateway_pb2.PlanTurnRequest(body=body, api=api),
    "ReportTurn": report,
}

TURNS = ("ChatCompletions", "CreateChatCompletion", "PlanTurn")
COMPLETIONS = ("Completions", "CreateCompletion")
ENDINGS = ("EndConversation", "DeleteConversation")
LISTS = ("ListModels", "GetModels")


@asynccontextmanager
async def staged(tmp_path: Path, **more: Any) -> AsyncIterator[Scene]:
    tenants, key = tmp_path / "tenants.toml", tmp_path / "key"
    tenants.write_text(f'[tenants.north]\nkey_sha256 = ["{hashlib.sha256(b"k").hexdigest()}"]')
    key.write_text("0123456789abcdef")
    options: dict[str, Any] = {
        "tenants_file": str(tenants),
        "cluster_key_file": str(key),
        "max_turns": 1,
        "body_limit": 10_000,
        **more,
    }
    async with router_stack(listen_gateway="127.0.0.1:0", **options) as stack, AsyncExitStack() as exits:
        ports = {"GatewayService": stack.router.gateway_port}
        channels = {
            name: await exits.enter_async_context(open_channel(f"127.0.0.1:{ports.get(name, stack.router.grpc_port)}"))
            for name in SERVICES
        }
        yield Scene(stack, channels)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with staged(tmp_path) as scene:
        yield scene


@pytest.fixture
async def explaining(tmp_path: Path) -> AsyncIterator[Scene]:
    """A router that may name nodes."""
    async with staged(tmp_path, explain=True) as scene:
        yield scene


def test_every_rpc_is_here() -> None:
    assert set(REQUESTS) == set(STUBS)


@pytest.mark.parametrize("rpc", sorted(REQUESTS))
async def test_a_message_that_is_none(scene: Scene, rpc: str) -> None:
    method = next(method for service in services("backhaul.router") for method in service.methods if method.name == rpc)
    service, _ = STUBS[rpc]
    call: Any = scene.channels[service].unary_unary(f"/{method.containing_service.full_name}/{rpc}")

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff", timeout=10)
    assert said(caught.value) == Told("INVALID_ARGUMENT", "UNREADABLE")


@pytest.mark.parametrize("rpc", sorted(REQUESTS))
async def test_a_wrong_key(scene: Scene, rpc: str) -> None:
    fields = {"body": CHAT} if rpc == "EndConversation" else {"id": "a"} if rpc == "DeleteConversation" else {}

    # Who may not be told anything is not asked for a key.
    expected = Told("FAILED_PRECONDITION", "EXPLAIN_OFF") if rpc == "FindConversation" else None
    assert await scene.failure(rpc, key=WRONG, **fields) == (expected or Told("UNAUTHENTICATED", "INVALID_API_KEY"))


async def test_a_search_for_a_conversation(explaining: Scene) -> None:
    unnamed, unreadable, large = [
        await explaining.failure("FindConversation", body=body) for body in (b"", b"{", b"x" * 20_000)
    ]
    stranger = await explaining.failure("FindConversation", key=WRONG, body=CHAT)
    explaining.stack.directory.failure = UnavailableError("ETCD_UNAVAILABLE", "etcd does not answer")
    away = await explaining.failure("FindConversation", body=CHAT)

    assert unnamed == unreadable == Told("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert large == Told("RESOURCE_EXHAUSTED", "BODY_LIMIT")
    assert stranger == Told("UNAUTHENTICATED", "INVALID_API_KEY")
    assert away == Told("UNAVAILABLE", "NO_CAPACITY", 1)


@pytest.mark.parametrize("rpc", sorted({*REQUESTS} - {*ENDINGS, *LISTS, "FindConversation", "ReportTurn"}))
async def test_a_body_that_is_none_and_one_that_is_too_large(scene: Scene, rpc: str) -> None:
    bad = await scene.failure(rpc, body=b"{")
    large = await scene.failure(rpc, body=b"x" * 20_000)

    expected = Told("FAILED_PRECONDITION", "EXPLAIN_OFF") if rpc == "Explain" else None
    assert bad == (expected or Told("INVALID_ARGUMENT", "INVALID_REQUEST"))
    assert large == Told("RESOURCE_EXHAUSTED", "BODY_LIMIT")


@pytest.mark.parametrize("rpc", ENDINGS)
async def test_an_ending_that_names_no_conversation(scene: Scene, rpc: str) -> None:
    assert await scene.failure(rpc) == Told("INVALID_ARGUMENT", "INVALID_REQUEST")


@pytest.mark.parametrize("rpc", ENDINGS)
async def test_an_ending_without_a_registry(scene: Scene, rpc: str) -> None:
    scene.stack.directory.failure = UnavailableError("ETCD_UNAVAILABLE", "etcd does not answer")
    named = {"body": CHAT} if rpc == "EndConversation" else {"id": "a"}

    assert await scene.failure(rpc, **named) == Told("UNAVAILABLE", "NO_CAPACITY", 1)


@pytest.mark.parametrize("rpc", ["Explain", "PlanTurn"])
async def test_an_api_that_is_none(scene: Scene, rpc: str) -> None:
    assert await scene.failure(rpc, api=7) == Told("INVALID_ARGUMENT", "API")


@pytest.mark.parametrize("rpc", TURNS)
async def test_a_model_that_nobody_has(scene: Scene, rpc: str) -> None:
    assert await scene.failure(rpc, body=OTHER) == Told("NOT_FOUND", "MODEL_NOT_FOUND")


@pytest.mark.parametrize("rpc", [*TURNS, *COMPLETIONS])
async def test_a_router_that_is_full(scene: Scene, rpc: str) -> None:
    scene.stack.prefill.then(hang())
    running = asyncio.ensure_future(scene.call("ChatCompletions"))
    await eventually(lambda: len(scene.stack.prefill.legs) == 1)
    try:
        assert await scene.failure(rpc) == Told("RESOURCE_EXHAUSTED", "TOO_MANY_TURNS", 1)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await eventually(lambda: scene.stack.router.admission.turn_count == 0)


@pytest.mark.parametrize("rpc", [*TURNS, *LISTS])
async def test_no_engines(scene: Scene, rpc: str) -> None:
    await scene.stack.lose(scene.stack.decode)
    await scene.stack.lose(scene.stack.prefill)

    assert await scene.failure(rpc) == Told("UNAVAILABLE", "NO_CAPACITY", 1)


@pytest.mark.parametrize("rpc", TURNS)
async def test_an_engine_that_refuses_the_request(scene: Scene, rpc: str) -> None:
    scene.stack.prefill.then(refuse(400, "too long"))

    told = await scene.failure(rpc)
    assert (told.code, told.retry_s) == ("INVALID_ARGUMENT", None)
    assert told.reason


Report = gateway_pb2.ReportTurnRequest
UNKNOWN = "0" * 32


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"turn_id": "x"}, Told("INVALID_ARGUMENT", "TURN_ID")),
        ({"turn_id": f"{UNKNOWN}.{UNKNOWN}"}, Told("FAILED_PRECONDITION", "OTHER_ROUTER")),
        ({"left": None}, Told("INVALID_ARGUMENT", "STEP")),
        ({"left": None, "failed": Report.Failed()}, Told("INVALID_ARGUMENT", "STEP")),
        (
            {"left": None, "failed": Report.Failed(cause=Report.Failed.CAUSE_STATUS, http_status=200)},
            Told("INVALID_ARGUMENT", "STEP"),
        ),
    ],
)
async def test_reports_that_cannot_be(scene: Scene, fields: dict[str, Any], told: Told) -> None:
    assert await scene.failure("ReportTurn", **fields) == told


async def test_reports_of_a_turn_that_is_over_or_unknown(scene: Scene) -> None:
    plan = await scene.call("PlanTurn")
    early = await scene.failure("ReportTurn", turn_id=plan.turn_id, left=None, done=Report.Done())
    await scene.call("ReportTurn", turn_id=plan.turn_id)
    over = await scene.failure("ReportTurn", turn_id=plan.turn_id, left=None, sending=Report.Sending())
    unknown = await scene.failure("ReportTurn", turn_id=f"{plan.turn_id.partition('.')[0]}.{UNKNOWN}")

    assert early == Told("FAILED_PRECONDITION", "NOT_SENDING")
    assert over == Told("FAILED_PRECONDITION", "TURN_OVER")
    assert unknown == Told("NOT_FOUND", "TURN_UNKNOWN")
