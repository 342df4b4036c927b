"""Turns of which a gateway sends the decode leg: what is learnt of them, what fails, and who leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from backhaul_router.core.health.breakers import BreakerState
from backhaul_router.core.nodes import Node
from tests.fakes.engine import FakeEngine, bare_500, break_after, event_of, refuse, reset
from tests.fakes.eventually import eventually
from tests.fakes.gateway import FakeGateway
from tests.fakes.router_stack import RouterStack, router_stack
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


async def turn_logged(logs: list[Any]) -> dict[str, Any]:
    """Returns the only line about a turn, once it is there."""

    def lines() -> list[dict[str, Any]]:
        return [line for line in logs if line["event"] == "turn"]

    await eventually(lambda: bool(lines()))
    (line,) = lines()
    return line


# What is learnt


async def test_of_a_stream_it_is_known_when_its_first_token_came_and_that_it_ended(front: Front) -> None:
    front.stack.decode.chunk_gate = asyncio.Event()
    with capture_logs() as logs:
        asked = asyncio.create_task(front.gateway.chat("hi", stream=True))
        await eventually(lambda: bool(front.stack.decode.legs))
        await asyncio.sleep(0.3)
        front.stack.decode.chunk_gate.set()
        got = await asked
        line = await turn_logged(logs)

    assert (got.status, got.body) == (200, STREAMED)
    assert line["result"] == "ok"
    # The stream waited after its first event.
    assert 0 < line["ttft_ms"] < 300


async def test_of_a_whole_answer_it_is_known_when_it_came(front: Front) -> None:
    with capture_logs() as logs:
        got = await front.gateway.chat("hi")
        line = await turn_logged(logs)

    assert (got.status, b"Hello there" in got.body) == (200, True)
    assert (line["result"], line["ttft_ms"], line["answer_ms"] > 0) == ("ok", None, True)


async def test_a_whole_answer_carries_no_handles_although_vllms_own_connector_puts_some_in() -> None:
    async with front_of(decode=FakeEngine("decode", connector=False)) as front:
        got = await front.gateway.chat("hi")

    assert (got.status, b"Hello there" in got.body) == (200, True)
    assert b"kv_transfer_params" not in got.body


@pytest.mark.parametrize(("status", "result"), [(400, "refused"), (500, "failed")])
async def test_an_engines_errors_pass_and_are_counted_as_such(front: Front, status: int, result: str) -> None:
    front.stack.decode.then(refuse(status, "no"))
    with capture_logs() as logs:
        got = await front.gateway.chat("hi", stream=True)
        line = await turn_logged(logs)

    assert (got.status, b'"no"' in got.body) == (status, True)
    assert line["result"] == result


async def test_an_answer_that_its_engine_breaks_off_is_cut_and_nobody_waits_for_what_it_leaves(front: Front) -> None:
    front.stack.decode.then(break_after([event_of("Hel")]))
    with capture_logs() as logs:
        with pytest.raises(aiohttp.ClientPayloadError):
            await front.gateway.chat("hi", stream=True)
        line = await turn_logged(logs)

    assert line["result"] == "cut"
    before = len(front.stack.directory.lookups)
    await front.gateway.chat("hi", "Hel", "more", stream=True)
    assert len(front.stack.directory.lookups) == before + 1


async def test_an_engine_that_is_said_to_have_broken_off_an_answer_is_avoided(front: Front) -> None:
    other = await front.stack.add(FakeEngine("decode"))
    await front.gateway.log_broken("unheard-of")
    await front.gateway.log_broken(front.node().node_id)
    for _ in range(3):
        await front.gateway.chat("hi", stream=True)

    assert front.state() is BreakerState.OPEN
    assert (len(front.stack.decode.legs), len(other.legs)) == (0, 3)


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


async def test_a_hand_off_that_may_have_been_read_is_not_released(front: Front) -> None:
    front.stack.decode.then(reset())
    got = await front.gateway.chat("hi", stream=True)

    assert (got.status, front.state()) == (502, BreakerState.OPEN)
    await eventually(lambda: front.stack.router.admission.turn_count == 0)
    assert front.stack.owner.released == []
