"""Streams: bytes pass untouched and at once, limits are separate, and clients that leave end everything."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from tests.fakes.engine import FakeEngine, Leg, Step, answer, break_after, event_of, hang, raw_stream, reset
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, Got, RouterStack, chat_body, router_stack

EMOJI = event_of("你好 👋🏽")


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(idle_timeout_s=5.0) as stack:
        yield stack


# Bytes


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([bytes([byte]) for byte in EMOJI], id="one byte at a time"),
        pytest.param([b'data:{"a":1}\r\n\r\n', b": ping\n\n", b"data: 1\ndata: 2\n\n", b"id: 7\n\n"], id="dialects"),
        pytest.param([b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'], id="usage only"),
        pytest.param([b"data: " + b"x" * (2 * 1024 * 1024) + b"\n\n"], id="one line of 2 MiB"),
    ],
)
async def test_a_stream_passes_byte_for_byte(stack: RouterStack, pieces: list[bytes]) -> None:
    stack.decode.then(raw_stream(stack.decode, pieces))
    got = await stack.chat("hi", stream=True)
    assert got.body == b"".join(pieces) + b"data: [DONE]\n\n"
    assert got.headers["content-type"].startswith("text/event-stream")


async def test_each_event_arrives_before_the_next_exists(stack: RouterStack) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    async with stack.client.post(f"{stack.url}{CHAT}", json=chat_body("hi", stream=True)) as response:
        first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 2)
        assert first == event_of("Hel")
        stack.decode.chunk_gate.set()
        assert (await response.read()).endswith(b"[DONE]\n\n")


async def test_a_hand_off_of_many_blocks_passes(stack: RouterStack) -> None:
    stack.prefill.block_ids = [list(range(20_000))]
    assert (await stack.chat("hi")).status == 200
    params = stack.decode.legs[0].params
    assert params is not None
    assert params["remote_block_ids"] == stack.prefill.block_ids


async def test_bodies_of_megabytes_pass_both_ways(stack: RouterStack) -> None:
    text = "x" * (6 * 1024 * 1024)
    stack.decode.then(answer({"text": text, "kv_transfer_params": None}))
    got = await stack.chat(text)
    assert (got.status, len(got.body)) == (200, len(text) + len('{"text":""}'))
    assert stack.decode.legs[0].body["messages"][0]["content"] == text


# Limits


async def test_a_slow_first_token_is_not_an_idle_stream() -> None:
    async with router_stack(idle_timeout_s=0.2, first_byte_timeout_s=5.0) as stack:
        stack.decode.then(_late(0.5))
        assert (await stack.chat("hi", stream=True)).status == 200


async def test_a_stream_that_falls_silent_ends_at_the_idle_limit_with_an_error() -> None:
    async with router_stack(idle_timeout_s=0.3) as stack:
        stack.decode.chunk_gate = asyncio.Event()
        began = time.monotonic()
        got = await stack.chat("hi", stream=True)
        assert 0.25 < time.monotonic() - began < 3
        assert got.body.startswith(event_of("Hel"))
        assert b'"error"' in got.body
        assert b"[DONE]" not in got.body


async def test_a_stream_may_take_longer_than_every_limit_together() -> None:
    async with router_stack(
        idle_timeout_s=0.4, first_byte_timeout_s=0.4, prefill_timeout_s=0.4, connect_timeout_s=0.4
    ) as stack:
        stack.decode.then(_drip(12, 0.1))
        got = await stack.chat("hi", stream=True)
        assert got.body == event_of("x") * 12 + b"data: [DONE]\n\n"


async def test_decode_that_never_begins_fails_at_its_limit() -> None:
    async with router_stack(first_byte_timeout_s=0.3) as stack:
        stack.decode.then(hang())
        got = await stack.chat("hi", stream=True)
        assert got.status == 504
        await eventually(stack.decode.legs[0].closed_early.is_set)


async def test_prefill_that_never_answers_fails_at_its_limit() -> None:
    async with router_stack(prefill_timeout_s=0.3) as stack:
        stack.prefill.then(hang())
        assert (await stack.chat("hi")).status == 504
        await eventually(stack.prefill.legs[0].closed_early.is_set)
        assert stack.decode.legs == []
        assert stack.router.routing.live.load.total == 0


async def test_hanging_requests_do_not_hold_up_a_healthy_one() -> None:
    async with router_stack(prefill_timeout_s=1.5) as stack:
        stack.prefill.then(*[hang() for _ in range(50)])
        stuck = [asyncio.create_task(stack.chat("hi")) for _ in range(50)]
        await eventually(lambda: len(stack.prefill.legs) == 50)
        began = time.monotonic()
        assert (await stack.chat("hi")).status == 200
        assert time.monotonic() - began < 1
        assert {got.status for got in await asyncio.gather(*stuck)} == {504}
        assert stack.router.routing.live.load.total == 0


# Breaks


async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done(stack: RouterStack) -> None:
    stack.decode.then(break_after([event_of("Hel"), b'data: {"choi']))
    got = await stack.chat("hi", stream=True)
    head, _, event = got.body.rpartition(b"\n\ndata: ")
    assert head + b"\n\n" == event_of("Hel")
    assert event.startswith(b'{"error"')
    assert b"[DONE]" not in got.body


async def test_an_engine_that_reads_and_closes_is_asked_at_most_once_more(stack: RouterStack) -> None:
    stack.prefill.then(reset())
    assert (await stack.chat("hi")).status == 200
    assert len(stack.prefill.legs) == 2


async def test_an_engine_that_is_gone_is_not_waited_for(stack: RouterStack) -> None:
    await stack.add(FakeEngine("decode"))
    await stack.decode.stop()
    for _ in range(4):
        assert (await stack.chat("hi", stream=True)).status == 200
    await stack.decode.start()


# Clients that leave


async def streaming(stack: RouterStack) -> None:
    stack.decode.chunk_gate = asyncio.Event()


async def in_prefill(stack: RouterStack) -> None:
    stack.prefill.then(hang())


async def waiting_for_decode(stack: RouterStack) -> None:
    stack.decode.then(hang())


PHASES = pytest.mark.parametrize(
    ("phase", "leg_of"),
    [
        pytest.param(in_prefill, lambda stack: stack.prefill, id="prefill"),
        pytest.param(waiting_for_decode, lambda stack: stack.decode, id="before the first byte"),
        pytest.param(streaming, lambda stack: stack.decode, id="streaming"),
    ],
)


@pytest.mark.parametrize(
    ("phase", "leg_of", "stream"),
    [
        pytest.param(in_prefill, lambda stack: stack.prefill, True, id="prefill, streamed"),
        pytest.param(in_prefill, lambda stack: stack.prefill, False, id="prefill"),
        pytest.param(waiting_for_decode, lambda stack: stack.decode, True, id="before the first byte, streamed"),
        pytest.param(waiting_for_decode, lambda stack: stack.decode, False, id="before the first byte"),
        pytest.param(streaming, lambda stack: stack.decode, True, id="streaming"),
    ],
)
async def test_a_client_that_closes_ends_both_legs_within_a_second(
    stack: RouterStack,
    phase: Callable[[RouterStack], Awaitable[None]],
    leg_of: Callable[[RouterStack], FakeEngine],
    stream: bool,
) -> None:
    await phase(stack)
    request = asyncio.create_task(stack.chat("hi", stream=stream))
    await eventually(lambda: bool(leg_of(stack).legs))
    if phase is streaming:
        await asyncio.sleep(0.05)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    await _ends(stack, leg_of(stack).legs[0])


@PHASES
async def test_a_client_that_shuts_down_both_ways_ends_both_legs_within_a_second(
    stack: RouterStack,
    phase: Callable[[RouterStack], Awaitable[None]],
    leg_of: Callable[[RouterStack], FakeEngine],
) -> None:
    """A closed socket shows as an end of input first, like one that is closed only half."""
    await phase(stack)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write(_raw_request(stream=True))
    await eventually(lambda: bool(leg_of(stack).legs))
    writer.close()
    await writer.wait_closed()
    del reader
    await _ends(stack, leg_of(stack).legs[0])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_only_its_sending_side_gets_its_answer(stack: RouterStack, stream: bool) -> None:
    stack.decode.then(_late(0.8))
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write(_raw_request(stream=stream))
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    assert b"HTTP/1.1 200 OK" in answer
    assert b"lo" in answer
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_closes_its_sending_side_while_it_reads_gets_the_rest(stack: RouterStack) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write(_raw_request(stream=True))
    await reader.readuntil(event_of("Hel"))
    writer.write_eof()
    await asyncio.sleep(0.5)
    stack.decode.chunk_gate.set()
    rest = await asyncio.wait_for(reader.read(), 5)
    sizes = [int(line, 16) for line in rest.split(b"\r\n") if line and not line.startswith(b"data")]
    assert sizes[-1] == 0
    assert event_of("lo") in rest
    writer.close()
    await writer.wait_closed()


async def test_a_connection_without_a_request_closes_with_its_client(stack: RouterStack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 2) == b""
    writer.close()
    await writer.wait_closed()


async def test_garbage_gets_an_error_in_openais_form(stack: RouterStack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write(b"NONSENSE\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 2)
    assert answer.startswith(b"HTTP/1.")
    assert b" 400 " in answer
    assert b'{"error"' in answer
    writer.close()
    await writer.wait_closed()


async def test_the_first_event_comes_with_the_head(stack: RouterStack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write(_raw_request(stream=True))
    first = await reader.read(65_536)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data: " in first
    writer.close()
    await writer.wait_closed()


async def test_a_storm_of_aborts_and_the_death_of_an_engine_leave_the_others_served(stack: RouterStack) -> None:
    await stack.add(FakeEngine("decode"))
    chance = random.Random(5)
    began: list[asyncio.Task[object]] = []
    for index in range(60):
        task = asyncio.create_task(stack.chat("hi", stream=True))
        asyncio.get_running_loop().call_later(chance.uniform(0, 0.05), task.cancel)
        began.append(task)
        if index == 20:
            await stack.decode.stop()
        await asyncio.sleep(0.005)
    await asyncio.gather(*began, return_exceptions=True)
    assert [(await stack.chat("hi")).status for _ in range(5)] == [200] * 5
    await eventually(lambda: stack.router.routing.live.load.total == 0)
    await stack.decode.start()


async def test_engines_that_come_and_go_leave_no_request_hanging() -> None:
    async with router_stack(connect_timeout_s=1.0, prefill_timeout_s=3.0, first_byte_timeout_s=3.0) as stack:

        async def churn() -> None:
            while True:
                engine = await stack.add(FakeEngine("decode"))
                await asyncio.sleep(0.1)
                await stack.directory.remove(f"decode-{engine.port}")
                await engine.stop()

        churning = asyncio.create_task(churn())
        asking: list[asyncio.Task[Got]] = []
        for _ in range(100):
            asking.append(asyncio.create_task(stack.chat("hi", stream=True)))
            await asyncio.sleep(0.01)
        answers = await asyncio.wait_for(asyncio.gather(*asking), 15)
        churning.cancel()
        await asyncio.wait([churning])
        assert {got.status for got in answers} == {200}
        await eventually(lambda: stack.router.routing.live.load.total == 0)


async def _ends(stack: RouterStack, leg: Leg) -> None:
    began = time.monotonic()
    await eventually(leg.closed_early.is_set, 2)
    assert time.monotonic() - began < 1
    await eventually(lambda: stack.router.routing.live.load.total == 0, 1)


def _raw_request(*, stream: bool) -> bytes:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"stream":%s}' % (
        b"true" if stream else b"false"
    )
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _late(seconds: float) -> Step:
    async def step(request: web.Request, leg: Leg) -> web.StreamResponse | None:
        await asyncio.sleep(seconds)
        return None

    return step


def _drip(count: int, pause_s: float) -> Step:
    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(count):
            await response.write(event_of("x"))
            await asyncio.sleep(pause_s)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    return step
