"""A gateway that moves the bytes itself, over real channels and to engines that record what they are sent."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest

from backhaul.router.v1 import gateway_pb2 as pb
from backhaul.router.v1 import gateway_pb2_grpc, router_pb2
from backhaul_common.grpc_client import open_channel, to_error
from tests.fakes.engine import FakeEngine, event_of, hang
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key

Stub: TypeAlias = "gateway_pb2_grpc.GatewayServiceAsyncStub"
SENDING = pb.ReportTurnRequest.Sending()


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(listen_gateway="127.0.0.1:0", plan_send_s=30.0) as stack:
        yield stack


@pytest.fixture
async def stub(stack: RouterStack) -> AsyncIterator[Stub]:
    async with connected(stack) as stub:
        yield stub


@asynccontextmanager
async def connected(stack: RouterStack) -> AsyncIterator[Stub]:
    async with open_channel(f"127.0.0.1:{stack.router.gateway_port}") as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


def asked(*contents: str, endpoints: tuple[str, ...] = (), **fields: Any) -> pb.PlanTurnRequest:
    body = json.dumps(chat_body(*contents, **fields)).encode()
    return pb.PlanTurnRequest(api=router_pb2.API_CHAT_COMPLETIONS, body=body, endpoints=endpoints)


def idle(stack: RouterStack) -> bool:
    router = stack.router
    return not (router.admission.turn_count or router.admission.held_bytes or router.routing.live.load.total)


async def send(stack: RouterStack, plan: pb.PlanTurnResponse) -> tuple[int, bytes]:
    """Sends a planned leg as it says."""
    async with stack.client.post(plan.url, data=plan.body, headers=dict(plan.headers)) as answer:
        return answer.status, await answer.read()


async def reason_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return to_error(caught.value).reason


async def test_a_planned_turn_is_sent_by_the_gateway_and_streams_past_the_router(
    stack: RouterStack, stub: Stub
) -> None:
    plan = await stub.PlanTurn(asked("hi", stream=True), timeout=5)
    told = await stub.ReportTurn(pb.ReportTurnRequest(turn_id=plan.turn_id, sending=SENDING), timeout=5)
    status, body = await send(stack, plan)
    first = pb.ReportTurnRequest.FirstByte()
    first.after.FromMilliseconds(1)
    await stub.ReportTurn(pb.ReportTurnRequest(turn_id=plan.turn_id, first_byte=first), timeout=5)
    done = pb.ReportTurnRequest(turn_id=plan.turn_id, done=pb.ReportTurnRequest.Done())
    ends = [await stub.ReportTurn(done, timeout=5) for _ in range(2)]

    (prefill,), (decode,) = stack.prefill.legs, stack.decode.legs
    assert (status, body) == (200, b"".join(map(event_of, stack.decode.text)) + b"data: [DONE]\n\n")
    assert (plan.started.route, plan.started.prompt_token_count) == ("cold", 200)
    assert prefill.params is not None
    assert decode.params is not None
    assert decode.params["remote_engine_id"] == stack.prefill.engine_id
    assert not plan.answer_names_hosts
    assert (plan.send_within.seconds, told.report_within.seconds) == (30, 600)
    assert not any(end.HasField("report_within") for end in ends)
    assert idle(stack)
    await stack.told()
    assert stack.owner.released == []


async def test_a_warm_turn_says_so(stack: RouterStack, stub: Stub) -> None:
    stack.hold()
    stack.publish(label_key("hi"))
    plan = await stub.PlanTurn(asked("hi", "hello", "more"), timeout=5)

    assert (plan.started.route, plan.started.source, plan.started.read_token_count) == ("warm", "claimed", 128)
    assert len(stack.owner.claims) == 1


async def test_only_engines_that_the_gateway_names_are_planned_for(stack: RouterStack, stub: Stub) -> None:
    other = await stack.add(FakeEngine("decode"))
    plans = [await stub.PlanTurn(asked("hi", endpoints=(f"127.0.0.1:{other.port}",)), timeout=5) for _ in range(4)]

    assert {plan.endpoint for plan in plans} == {f"127.0.0.1:{other.port}"}
    assert await reason_of(stub.PlanTurn(asked("hi", endpoints=("10.0.0.1:1",)), timeout=5)) == "NO_CAPACITY"


async def test_an_answer_that_may_name_hosts_is_said_to() -> None:
    bare = FakeEngine("decode", connector=False)
    async with router_stack(listen_gateway="127.0.0.1:0", decode=bare) as stack, connected(stack) as stub:
        plan = await stub.PlanTurn(asked("hi"), timeout=5)
        _, body = await send(stack, plan)

    assert plan.answer_names_hosts
    assert b"kv_transfer_params" in body


async def test_a_plan_that_is_never_sent_is_given_up() -> None:
    async with router_stack(listen_gateway="127.0.0.1:0", plan_send_s=0.3) as stack, connected(stack) as stub:
        plan = await stub.PlanTurn(asked("hi"), timeout=5)
        await eventually(lambda: idle(stack))
        await eventually(lambda: len(stack.owner.released) == 1)
        late = stub.ReportTurn(pb.ReportTurnRequest(turn_id=plan.turn_id, sending=SENDING), timeout=5)

        assert await reason_of(late) == "TURN_OVER"


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_plan_whose_caller_does_not_wait_ends_the_prefill_leg(stack: RouterStack, stub: Stub, how: str) -> None:
    stack.prefill.then(hang())
    call = stub.PlanTurn(asked("hi"), timeout=0.5 if how == "late" else 20)
    waiting = asyncio.ensure_future(_wait(call))
    await eventually(lambda: len(stack.prefill.legs) == 1)
    if how == "cancelled":
        call.cancel()
    await asyncio.wait([waiting])

    await asyncio.wait_for(stack.prefill.legs[0].closed_early.wait(), 5)
    await eventually(lambda: idle(stack))
    assert stack.decode.legs == []


async def _wait(call: Any) -> None:
    await call


async def test_without_its_address_nobody_can_plan(stack: RouterStack) -> None:
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub: Stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PlanTurn(asked("hi"), timeout=5)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
