"""Turns of which a gateway sends the decode leg: what is learnt of them, what fails, and who leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from backhaul.envoy.v3 import access_log_pb2, access_log_pb2_grpc
from backhaul_common.grpc_client import open_channel
from backhaul_router.core.health.breakers import BreakerState
from backhaul_router.core.nodes import Node
from tests.fakes.engine import FakeEngine, bare_500, break_after, event_of, refuse, reset
from tests.fakes.eventually import eventually
from tests.fakes.gateway import FakeGateway
from tests.fakes.router_stack import RouterStack, router_for, router_stack
from tests.integration.test_router_turns import label_key

STREAMED = b"".join(map(event_of, ("Hel", "lo", " there"))) + b"data: [DONE]\n\n"


@dataclass
class Front:
    """A router, and a gateway before it."""

    stack: RouterStack
    gateway: FakeGateway

    def node(self, engine: FakeEngine | None = None) -> Node:
        engine = engine or self.stack.decode
        node = self.stack.router.table.get(f"{engine.role}-{engine.port}")
        assert node is not None
        return node

    def state(self, engine: FakeEngine | None = None) -> BreakerState:
        return self.stack.router.routing.live.breakers.state(self.node(engine))

    def hold(self) -> tuple[str, ...]:
        """Has the decode engine hold a conversation; returns its next turn."""
        self.stack.hold()
        self.stack.publish(label_key("hi"))
        return "hi", "hello", "more"


@pytest.fixture(name="front")
async def front_fixture() -> AsyncIterator[Front]:
    async with front_of() as front:
        yield front


@asynccontextmanager
async def front_of(**options: Any) -> AsyncIterator[Front]:
    """Starts both; at the end nothing may count as running."""
    async with router_stack(listen_ext_proc="127.0.0.1:0", **options) as stack:
        router = stack.router
        async with FakeGateway(f"127.0.0.1:{router.ext_proc_port}") as gateway:
            yield Front(stack, gateway)
            await eventually(lambda: router.admission.turn_count == 0)
        assert (router.admission.held_bytes, router.routing.live.load.total) == (0, 0)


# What is learnt


async def test_a_stream_passes_and_routers_hear_how_long_it_took_to_begin(front: Front) -> None:
    costs, key = front.stack.router.routing.live.costs, (front.node().node_id, front.stack.decode.engine_id)
    unknown = costs.decode_s(key, moved=1_000)
    got = await front.gateway.chat("hi", stream=True)

    assert (got.status, got.body) == (200, STREAMED)
    assert costs.decode_s(key, moved=1_000) != unknown


async def test_a_whole_answer_carries_no_handles_although_vllms_own_connector_puts_some_in() -> None:
    async with front_of(decode=FakeEngine("decode", connector=False)) as front:
        got = await front.gateway.chat("hi")

    assert (got.status, b"Hello there" in got.body) == (200, True)
    assert b"kv_transfer_params" not in got.body


@pytest.mark.parametrize("status", [400, 500])
async def test_an_engines_errors_pass(front: Front, status: int) -> None:
    front.stack.decode.then(refuse(status, "no"))
    got = await front.gateway.chat("hi", stream=True)

    assert (got.status, b'"no"' in got.body) == (status, True)


async def test_an_engine_that_breaks_off_an_answer_is_avoided(front: Front) -> None:
    other = await front.stack.add(FakeEngine("decode"))
    for engine in (front.stack.decode, other):
        engine.then(break_after([event_of("Hel")]))
    with pytest.raises(aiohttp.ClientPayloadError):
        await front.gateway.chat("hi", stream=True)
    broken, well = sorted((front.stack.decode, other), key=lambda engine: len(engine.legs), reverse=True)
    well.forget_steps()
    answers = [await front.gateway.chat("hi", stream=True) for _ in range(3)]

    assert (front.state(broken), front.state(well)) == (BreakerState.OPEN, BreakerState.CLOSED)
    assert [got.body for got in answers] == [STREAMED] * 3


async def test_what_an_engine_answers_counts_although_its_node_names_a_host(front: Front) -> None:
    costs, key = front.stack.router.routing.live.costs, (front.node().node_id, front.stack.decode.engine_id)
    unknown = costs.decode_s(key, moved=1_000)
    node = front.stack.directory.nodes[front.node().node_id]
    # A number of that form is resolved like a name.
    node.engine_url = f"http://127.1:{front.stack.decode.port}"
    await front.stack.directory.put(node)
    await eventually(lambda: front.node().engine_url == node.engine_url)
    served = {"x-gateway-destination-endpoint-served": f"127.0.0.1:{front.stack.decode.port}"}
    front.gateway.metadata["envoy.lb"] = served
    assert (await front.gateway.chat("hi", stream=True)).status == 200
    front.stack.decode.then(reset())
    assert (await front.gateway.chat("hi", stream=True)).status == 502

    assert front.state() is BreakerState.OPEN
    assert costs.decode_s(key, moved=1_000) != unknown, "the access log counts, too"


async def test_a_log_goes_to_any_router_and_what_it_cannot_read_is_left_aside(front: Front) -> None:
    async with router_for((front.stack.directory.address,), listen_ext_proc="127.0.0.1:0") as other:
        await eventually(lambda: len(other.table) == 2)
        front.gateway.log_to = f"127.0.0.1:{other.ext_proc_port}"
        front.stack.decode.then(break_after([event_of("Hel")]))
        with pytest.raises(aiohttp.ClientPayloadError):
            await front.gateway.chat("hi", stream=True)
        await front.gateway.log(access_log_pb2.AccessLogCommon())

        assert other.routing.live.breakers.state(front.node()) is BreakerState.OPEN
        assert front.state() is BreakerState.CLOSED


async def test_a_log_that_is_open_keeps_no_router_from_ending() -> None:
    clock = asyncio.get_running_loop()
    async with front_of(grace_s=30.0) as front:
        channel = open_channel(f"127.0.0.1:{front.stack.router.ext_proc_port}")
        call = access_log_pb2_grpc.AccessLogServiceStub(channel).StreamAccessLogs()
        await call.write(access_log_pb2.StreamAccessLogsMessage())
        await front.gateway.chat("hi")
        began = clock.time()
    assert clock.time() - began < 10
    await call
    await channel.close()


async def test_of_what_another_engine_answers_nothing_is_learnt_about_the_one_that_was_picked(front: Front) -> None:
    front.stack.decode.then(*[bare_500()] * 10)
    front.gateway.metadata["envoy.lb"] = {"x-gateway-destination-endpoint-served": "127.0.0.1:1"}
    for _ in range(5):
        await front.gateway.chat("hi")
    by_another = front.state()
    front.gateway.metadata["envoy.lb"] = {"x-gateway-destination-endpoint-served": front.node().endpoint}
    for _ in range(5):
        await front.gateway.chat("hi")

    assert (by_another, front.state()) == (BreakerState.CLOSED, BreakerState.OPEN)


async def test_the_holder_of_a_conversation_goes_on_by_itself() -> None:
    async with front_of(prefer="append") as front:
        contents = front.hold()
        got = await front.gateway.chat(*contents, stream=True)

        assert (got.status, got.route, got.body) == (200, "append", STREAMED)
        assert front.stack.prefill.legs == []


# What fails


async def test_a_turn_whose_blocks_cannot_be_read_is_computed_and_says_the_same(front: Front) -> None:
    contents = front.hold()
    front.stack.prefill.then(bare_500())
    got = await front.gateway.chat(*contents, stream=True)

    assert (got.status, got.route, got.miss) == (200, "cold", "prefill_failed")
    assert got.body == STREAMED
    assert len(front.stack.prefill.legs) == 2


async def test_where_no_prefill_engine_answers_the_decode_engine_computes(front: Front) -> None:
    await front.stack.prefill.stop()
    got = await front.gateway.chat("hi", stream=True)

    assert (got.status, got.headers["x-backhaul-fallback"], got.body) == (200, "decode", STREAMED)


async def test_a_decode_engine_that_refuses_connections_costs_one_turn_and_no_hand_off(front: Front) -> None:
    other = await front.stack.add(FakeEngine("decode"))
    await front.stack.decode.stop()
    answers = [await front.gateway.chat("hi", stream=True) for _ in range(6)]

    refused = [got for got in answers if got.status != 200]
    assert [(got.status, got.headers["retry-after"]) for got in refused] == [(503, "1")] * len(refused)
    assert len(refused) <= 1
    assert len(other.legs) == 6 - len(refused)
    await eventually(lambda: len(front.stack.owner.released) == len(refused))


async def test_a_decode_engine_whose_address_cannot_be_found_costs_one_turn_and_no_hand_off(front: Front) -> None:
    stack = front.stack
    other = await stack.add(FakeEngine("decode"))
    node = stack.directory.nodes[front.node().node_id]
    node.engine_url = "http://no..name:80"
    await stack.directory.put(node)
    await eventually(lambda: front.node().engine_url == node.engine_url)
    answers = [await front.gateway.chat("hi", stream=True) for _ in range(6)]

    failed = [got for got in answers if got.status != 200]
    assert [(got.status, got.headers["retry-after"]) for got in failed] == [(503, "1")]
    assert (len(other.legs), front.state()) == (5, BreakerState.OPEN)
    await eventually(lambda: len(stack.owner.released) == 1)


async def test_a_hand_off_that_may_have_been_read_is_not_released(front: Front) -> None:
    front.stack.decode.then(reset())
    got = await front.gateway.chat("hi", stream=True)

    assert (got.status, front.state()) == (502, BreakerState.OPEN)
    await eventually(lambda: front.stack.router.admission.turn_count == 0)
    await front.stack.told()
    assert front.stack.owner.released == []
