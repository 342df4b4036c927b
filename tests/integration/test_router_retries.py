"""What is tried again, where, and what the client sees: nothing, or a clear error."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from backhaul.registry.v1 import registry_pb2
from tests.fakes.engine import (
    FakeEngine,
    Step,
    answer,
    bare_500,
    event_of,
    failed_event,
    hang,
    raw_stream,
    refuse,
    reset,
    role_event,
)
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


def given_up(engine: FakeEngine) -> Step:
    """A stream as vLLM sends it when blocks could not be loaded."""
    return raw_stream(engine, [role_event(), failed_event()])


WHOLE_ERROR = {"choices": [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "error"}]}


# Blocks that the decode engine could not load


@pytest.mark.parametrize("pieces", [1, 2], ids=["at once", "in two pieces"])
async def test_a_stream_that_was_given_up_before_its_content_is_repeated_unseen(
    stack: RouterStack, pieces: int
) -> None:
    events = [role_event(), failed_event()] if pieces == 2 else [role_event() + failed_event()]
    stack.decode.then(raw_stream(stack.decode, events))
    got = await stack.chat("hi", stream=True)
    assert (got.status, got.miss) == (200, "decode_failed")
    assert got.body == b"".join(map(event_of, stack.decode.text)) + b"data: [DONE]\n\n"
    first, second = [leg.params or {} for leg in stack.decode.legs]
    assert first["remote_request_id"] == stack.prefill.handed_off[0]
    assert list(second) == ["backhaul"], "no other prefill node is there: decode computes the prompt"
    assert len(stack.prefill.legs) == 1


@pytest.mark.parametrize("step", [bare_500(), answer(WHOLE_ERROR)], ids=["bare 500", "200 with an error"])
async def test_a_whole_answer_that_was_given_up_is_repeated(stack: RouterStack, step: Step) -> None:
    stack.decode.then(step)
    got = await stack.chat("hi")
    assert (got.status, got.miss) == (200, "decode_failed")
    assert b"Hello there" in got.body


async def test_the_repetition_goes_to_another_decode_engine_if_there_is_one(stack: RouterStack) -> None:
    other = await stack.add(FakeEngine("decode"))
    stack.decode.then(given_up(stack.decode))
    for _ in range(3):
        assert (await stack.chat("hi", stream=True)).status == 200
    assert (len(stack.decode.legs), len(other.legs)) == (1, 3)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_that_is_given_up_twice_is_a_503_with_an_error(stack: RouterStack, stream: bool) -> None:
    step = given_up(stack.decode) if stream else answer(WHOLE_ERROR)
    stack.decode.then(step, step)
    got = await stack.chat("hi", stream=stream)
    assert (got.status, got.headers["retry-after"]) == (503, "1")
    assert got.headers["content-type"] == "application/json"
    assert b'"code":"no_capacity"' in got.body
    assert len(stack.decode.legs) == 2
    assert stack.router.routing.live.load.total == 0


async def test_an_error_after_content_is_passed_on(stack: RouterStack) -> None:
    events = [role_event(), event_of("Hel"), failed_event()]
    stack.decode.then(raw_stream(stack.decode, events))
    got = await stack.chat("hi", stream=True)
    assert got.body == b"".join(events) + b"data: [DONE]\n\n"
    assert len(stack.decode.legs) == 1


async def test_who_speaks_is_told_soon_even_when_nothing_follows(stack: RouterStack) -> None:
    stack.decode.then(raw_stream(stack.decode, [role_event(), event_of("Hel")]))
    stack.decode.chunk_gate = asyncio.Event()
    async with stack.client.post(f"{stack.url}{CHAT}", json=chat_body("hi", stream=True)) as response:
        began = time.monotonic()
        assert await response.content.readuntil(b"\n\n") == role_event()
        assert time.monotonic() - began < 1
        stack.decode.chunk_gate.set()
        assert (await response.read()).startswith(event_of("Hel"))


async def test_a_pair_that_cannot_exchange_is_set_apart(stack: RouterStack, capsys: pytest.CaptureFixture[str]) -> None:
    """One prefill engine cannot read from one holder: the next turns are cold on it, or warm through another."""
    stack.hold("set-1")
    stack.publish(label_key("hi"), "set-1")
    stack.prefill.then(bare_500())
    assert (await stack.chat("hi", "hello", "more")).miss == "prefill_failed"
    assert "pair set apart" in "".join(capsys.readouterr())
    assert (await stack.chat("hi", "hello", "more")).miss == "pair_apart"
    other = await stack.add(FakeEngine("prefill"))
    stack.hold("set-2")
    stack.directory.pointers.clear()
    stack.publish(label_key("hi"), "set-2")
    assert (await stack.chat("hi", "hello", "more")).route == "warm"
    assert [leg.params["remote_request_id"] for leg in other.legs if leg.params] == ["set-2"]


# Prefill nodes that fail


@pytest.mark.parametrize("fallback", ["strict", "decode"])
async def test_when_all_prefill_nodes_refuse_each_is_asked_once_and_the_policy_decides(fallback: str) -> None:
    async with router_stack(prefill_fallback=fallback) as stack:
        other = await stack.add(FakeEngine("prefill"))
        stack.prefill.then(refuse(503))
        other.then(refuse(503))
        began = time.monotonic()
        got = await stack.chat("hi")
        assert time.monotonic() - began < 2
        assert len(stack.prefill.legs) == len(other.legs) == 1
        if fallback == "strict":
            assert (got.status, got.headers["retry-after"], stack.decode.legs) == (503, "1", [])
        else:
            assert (got.status, got.headers["x-backhaul-fallback"]) == (200, "decode")
            assert list(stack.decode.legs[0].params or {}) == ["backhaul"]


@pytest.mark.parametrize("fallback", ["strict", "decode"])
async def test_when_one_prefill_node_breaks_connections_the_other_serves(fallback: str) -> None:
    async with router_stack(prefill_fallback=fallback) as stack:
        other = await stack.add(FakeEngine("prefill"))
        stack.prefill.then(reset(), reset(), reset())
        got = [await stack.chat("hi") for _ in range(6)]
        assert {(answer.status, answer.headers.get("x-backhaul-fallback")) for answer in got} == {(200, None)}
        assert len(stack.prefill.legs) == 1
        assert len(other.legs) == 6


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_prefills_refusal_is_the_clients_with_its_message(stack: RouterStack, status: int) -> None:
    stack.prefill.then(refuse(status, f"message {status}"))
    got = await stack.chat("hi", stream=True)
    assert got.status == status
    assert f'"message":"message {status}"'.encode() in got.body
    assert stack.decode.legs == []
    assert len(stack.prefill.legs) == 1


async def test_prefills_fault_is_an_error_of_ours(stack: RouterStack) -> None:
    stack.prefill.then(refuse(500, "secret host 10.0.0.9"))
    got = await stack.chat("hi")
    assert got.status == 502
    assert b'"type":"engine_error"' in got.body
    assert b"10.0.0.9" not in got.body
    assert stack.decode.legs == []


async def test_a_repetition_does_not_meet_another_connection_that_is_dead(stack: RouterStack) -> None:
    """All connections that were kept have ended at the engine's side, and nobody has noticed."""
    await asyncio.gather(*[stack.chat("hi") for _ in range(8)])
    for engine in (stack.prefill, stack.decode):
        engine.close_when_used()
    assert {(await stack.chat("hi")).status for _ in range(4)} == {200}


# Decode engines that refuse


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (429, 1), (500, 2)])
async def test_decodes_error_has_its_status_and_no_stream(
    stack: RouterStack, status: int, attempts: int, stream: bool
) -> None:
    stack.decode.then(*[refuse(status, "engine says no", {"retry-after": "7"}) for _ in range(2)])
    got = await stack.chat("hi", stream=stream)
    assert (got.status, got.headers["retry-after"]) == (status, "7")
    assert got.headers["content-type"].startswith("application/json")
    assert b"engine says no" in got.body
    assert b"[DONE]" not in got.body
    assert (len(stack.prefill.legs), len(stack.decode.legs)) == (1, attempts)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_engine_that_is_down_is_a_503(stack: RouterStack, stream: bool) -> None:
    await stack.decode.stop()
    got = await stack.chat("hi", stream=stream)
    assert got.status == 503
    assert got.headers["content-type"] == "application/json"
    assert b"[DONE]" not in got.body
    await stack.decode.start()


@pytest.mark.parametrize("fields", [{"model": "nope"}, {"messages": []}, {"messages": "hi"}])
async def test_what_decode_would_refuse_is_refused_before_prefill(
    stack: RouterStack, fields: dict[str, object]
) -> None:
    got = await stack.post(CHAT, {**chat_body("hi"), **fields})
    assert got.status in (400, 404)
    assert stack.prefill.legs == stack.decode.legs == []


# What counts against an engine


async def test_bad_requests_and_clients_that_leave_take_no_engine_out(stack: RouterStack) -> None:
    other = await stack.add(FakeEngine("decode"))
    for engine in (stack.decode, other):
        engine.then(*[refuse(400) for _ in range(10)])
    assert {(await stack.chat("hi")).status for _ in range(20)} == {400}
    for engine in (stack.decode, other):
        engine.then(*[hang() for _ in range(10)])
    leaving = [asyncio.create_task(stack.chat("hi")) for _ in range(20)]
    await eventually(lambda: len(stack.decode.legs) + len(other.legs) == 40)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    await eventually(lambda: stack.router.routing.live.load.total == 0)
    assert {(await stack.chat("hi")).status for _ in range(4)} == {200}
    assert len(stack.decode.legs) == len(other.legs) == 22


async def test_an_engine_that_is_always_unavailable_is_probed_and_comes_back(stack: RouterStack) -> None:
    await stack.add(FakeEngine("decode"))
    stack.decode.then(*[refuse(503) for _ in range(50)])
    assert {(await stack.chat("hi")).status for _ in range(10)} == {200}
    assert len(stack.decode.legs) <= 2
    stack.decode.forget_steps()
    served = len(stack.decode.legs)

    async def serves() -> bool:
        await stack.chat("hi")
        return len(stack.decode.legs) > served + 2

    await eventually(serves)


# Nodes that vanish


async def test_a_node_that_leaves_while_a_request_waits_there_costs_no_request(stack: RouterStack) -> None:
    """Its machine is gone: no connection is refused, nothing more comes."""
    stack.decode.then(hang())
    asking = asyncio.create_task(stack.chat("hi", stream=True))
    await eventually(lambda: bool(stack.decode.legs))
    await stack.add(FakeEngine("decode"))
    await stack.lose(stack.decode)
    got = await asyncio.wait_for(asking, 5)
    assert (got.status, got.miss) == (200, "decode_failed")
    await eventually(stack.decode.legs[0].closed_early.is_set)
    assert stack.router.routing.live.load.total == 0


async def test_a_node_that_is_not_ready_for_long_loses_its_waiting_requests() -> None:
    async with router_stack(gone_timeout_s=0.3) as stack:
        await stack.add(FakeEngine("prefill"))
        stack.prefill.then(hang())
        while not stack.prefill.legs:
            asking = asyncio.create_task(stack.chat("hi"))
            await asyncio.wait([asking], timeout=0.2)
        node = stack.directory.nodes[f"prefill-{stack.prefill.port}"]
        node.state = registry_pb2.NODE_STATE_NOT_READY
        await stack.directory.put(node)
        assert (await asyncio.wait_for(asking, 5)).status == 200
        await eventually(stack.prefill.legs[0].closed_early.is_set)


async def test_a_request_whose_blocks_are_at_a_node_that_vanishes_is_repeated(stack: RouterStack) -> None:
    """Decode waits for what it reads from there; nothing is wrong with decode itself."""
    stack.decode.then(hang())
    asking = asyncio.create_task(stack.chat("hi", stream=True))
    await eventually(lambda: bool(stack.decode.legs))
    other = await stack.add(FakeEngine("prefill"))
    await stack.lose(stack.prefill)
    got = await asyncio.wait_for(asking, 5)
    assert (got.status, got.miss) == (200, "decode_failed")
    assert len(other.legs) == 1
    assert len(stack.decode.legs) == 2


async def test_a_stream_goes_on_at_a_node_that_has_left_the_directory(stack: RouterStack) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    async with stack.client.post(f"{stack.url}{CHAT}", json=chat_body("hi", stream=True)) as response:
        assert await response.content.readuntil(b"\n\n") == event_of("Hel")
        await stack.lose(stack.decode)
        await asyncio.sleep(0.6)
        stack.decode.chunk_gate.set()
        assert (await response.read()).endswith(b"[DONE]\n\n")


# Hand-offs that wait


async def test_a_hand_off_that_cannot_be_delivered_in_time_is_made_anew() -> None:
    """The prefill engine keeps blocks for a limited time: what waited for a connection is not used."""
    async with router_stack(connect_timeout_s=0.2) as stack:
        with deaf_server() as url:
            node = registry_pb2.Node()
            node.CopyFrom(stack.directory.nodes[f"decode-{stack.decode.port}"])
            node.node_id, node.engine_url = "deaf", url
            node.engines[0].engine_id = "deaf-engine"
            await stack.directory.put(node)
            await eventually(lambda: stack.router.table.get("deaf") is not None)
            while len(stack.prefill.legs) == len(stack.decode.legs):
                began = time.monotonic()
                got = await stack.chat("hi", stream=True)
            assert (got.status, got.miss) == (200, "decode_failed")
            assert time.monotonic() - began < 2
            waited, used = stack.prefill.handed_off[-2:]
            assert stack.decode.legs[-1].params is not None
            assert stack.decode.legs[-1].params["remote_request_id"] == used != waited


async def test_a_decode_engine_that_cannot_be_reached_is_not_waited_for() -> None:
    async with router_stack(connect_timeout_s=0.2) as stack:
        with deaf_server() as url:
            node = registry_pb2.Node()
            node.CopyFrom(stack.directory.nodes[f"decode-{stack.decode.port}"])
            node.engine_url = url
            await stack.directory.put(node)
            await eventually(lambda: any(known.engine_url == url for known in stack.router.table))
            began = time.monotonic()
            assert (await stack.chat("hi", stream=True)).status == 503
            assert time.monotonic() - began < 2


@contextlib.contextmanager
def deaf_server() -> Iterator[str]:
    """Takes no connection: its queue is full."""
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
