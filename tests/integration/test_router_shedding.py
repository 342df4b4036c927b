"""Load above what a router takes: a clear refusal at once, bounded memory, and service as before when it is over."""

import asyncio
import contextlib
import gc
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_router import instruments
from backhaul_router.admission import MAX_LISTS
from tests.fakes.directory import FakeDirectory
from tests.fakes.engine import FakeEngine, Leg, Step, answer, break_after, event_of, hang, refuse, reset
from tests.fakes.eventually import eventually
from tests.fakes.owner import FakeOwner
from tests.fakes.readings import Readings
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack

MIB = 1024 * 1024


@contextlib.asynccontextmanager
async def client_of_many() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        yield client


async def post(client: aiohttp.ClientSession, stack: RouterStack, **fields: Any) -> tuple[int, str]:
    """Returns status and error code of a chat turn."""
    async with client.post(f"{stack.url}{CHAT}", json=chat_body("hi", **fields)) as response:
        body = await response.read()
        return response.status, "" if response.status == 200 else json.loads(body)["error"]["code"]


def grpc_request(**fields: Any) -> router_pb2.ChatCompletionsRequest:
    return router_pb2.ChatCompletionsRequest(body=json.dumps(chat_body("hi", **fields)).encode())


# Turns


@pytest.mark.parametrize("stream", [True, False])
async def test_ten_times_the_load_is_answered_or_refused_and_engines_see_no_more_than_the_limit(stream: bool) -> None:
    async with router_stack(max_turns=20) as stack, client_of_many() as client:
        at_once = _Gauge()
        stack.decode.then(*[at_once.slow(0.2) for _ in range(400)])
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, stack.router.admission.turn_count)
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(*[post(client, stack, stream=stream) for _ in range(200)])
        watching.cancel()
        await asyncio.wait([watching])
        assert set(answers) == {(200, ""), (429, "too_many_turns")}
        assert answers.count((200, "")) >= 20
        assert max(most, at_once.most) <= 20
        assert {status for status, _ in await asyncio.gather(*[post(client, stack) for _ in range(20)])} == {200}
        assert (stack.router.admission.turn_count, stack.router.admission.held_bytes) == (0, 0)


async def test_a_refusal_says_which_limit_it_is_and_when_to_try_again() -> None:
    async with router_stack(max_turns=1) as stack:
        stack.prefill.then(hang())
        running = asyncio.create_task(stack.chat("hi"))
        await eventually(lambda: stack.router.admission.turn_count == 1)
        got = await stack.chat("hi")
        assert (got.status, got.headers["retry-after"]) == (429, "1")
        error = json.loads(got.body)["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_turns")
        assert "1 turns run on this router, which is its limit" in error["message"]
        async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(grpc_request(), timeout=5).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert to_error(caught.value).reason == "TOO_MANY_TURNS"
        for path in ("/health", "/ready"):
            async with stack.client.get(f"{stack.url}{path}") as response:
                assert response.status == 200
        running.cancel()
        await asyncio.wait([running])
        await eventually(lambda: stack.router.admission.turn_count == 0)


async def test_http_and_grpc_share_one_limit_and_recover() -> None:
    async with router_stack(max_turns=10) as stack, client_of_many() as client:
        at_once = _Gauge()
        stack.decode.then(*[at_once.slow(0.2) for _ in range(200)])
        async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
            stub = router_pb2_grpc.InferenceServiceStub(channel)

            async def over_grpc() -> tuple[int, str]:
                try:
                    _ = [step async for step in stub.ChatCompletions(grpc_request(stream=True), timeout=10)]
                except grpc.aio.AioRpcError as error:
                    return 429, to_error(error).reason.lower()
                return 200, ""

            calls = [post(client, stack) if index % 2 else over_grpc() for index in range(100)]
            answers = await asyncio.gather(*calls)
            assert set(answers) == {(200, ""), (429, "too_many_turns")}
            assert at_once.most <= 10
            assert stack.router.admission.turn_count == 0
            assert await over_grpc() == (200, "")
        assert await post(client, stack) == (200, "")


async def test_model_lists_beyond_their_limit_are_refused() -> None:
    async with router_stack() as stack, client_of_many() as client:
        asked = asyncio.Event()
        stack.prefill.list_gate = asked

        async def models() -> int:
            async with client.get(f"{stack.url}/v1/models") as response:
                return response.status

        lists = [asyncio.create_task(models()) for _ in range(10 * MAX_LISTS)]
        await eventually(lambda: sum(each.done() for each in lists) == 9 * MAX_LISTS)
        asked.set()
        statuses = await asyncio.gather(*lists)
        assert (statuses.count(200), statuses.count(429)) == (MAX_LISTS, 9 * MAX_LISTS)


# Counted in and out once


async def _leave_in_prefill(stack: RouterStack) -> None:
    stack.prefill.then(hang())
    await _leave_when(stack, lambda: bool(stack.prefill.legs))


async def _leave_before_the_first_byte(stack: RouterStack) -> None:
    stack.decode.then(hang())
    await _leave_when(stack, lambda: bool(stack.decode.legs))


async def _leave_while_streaming(stack: RouterStack) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    response = await stack.client.post(f"{stack.url}{CHAT}", json=chat_body("hi", stream=True))
    await response.content.readuntil(b"\n\n")
    response.close()


async def _leave_while_sending(stack: RouterStack) -> None:
    _, writer = await _half_a_request(stack)
    await eventually(lambda: stack.router.admission.held_bytes == 50)
    writer.transport.abort()


async def _leave_when(stack: RouterStack, condition: Callable[[], bool]) -> None:
    request = asyncio.create_task(stack.chat("hi", stream=True))
    await eventually(condition)
    request.cancel()
    await asyncio.wait([request])


async def _cancel_over_grpc(stack: RouterStack) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        call = router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(grpc_request(stream=True))
        await call.read()
        await call.read()
        call.cancel()


async def _let_the_deadline_pass(stack: RouterStack) -> None:
    stack.prefill.then(hang())
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        call = router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(grpc_request(), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()


def _ask(**fields: Any) -> Callable[[RouterStack], Awaitable[None]]:
    async def ask(stack: RouterStack) -> None:
        await stack.chat("hi", **fields)

    return ask


def _scripted(*steps: Callable[[RouterStack], Step], **fields: Any) -> Callable[[RouterStack], Awaitable[None]]:
    async def ask(stack: RouterStack) -> None:
        stack.decode.then(*[step(stack) for step in steps])
        await stack.chat("hi", **fields)

    return ask


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(_ask(), id="answered"),
        pytest.param(_ask(stream=True), id="streamed"),
        pytest.param(_ask(model="nope"), id="unknown model"),
        pytest.param(_ask(max_tokens="many"), id="not valid"),
        pytest.param(_ask(pad="x" * 200_000), id="too large"),
        pytest.param(_scripted(lambda _: refuse(400)), id="refused"),
        pytest.param(_scripted(lambda _: reset(), lambda _: reset(), stream=True), id="reset"),
        pytest.param(_scripted(lambda _: break_after([event_of("Hel")]), stream=True), id="broken"),
        pytest.param(_leave_while_sending, id="client gone while it sends"),
        pytest.param(_leave_in_prefill, id="client gone in prefill"),
        pytest.param(_leave_before_the_first_byte, id="client gone before the first byte"),
        pytest.param(_leave_while_streaming, id="client gone while streaming"),
        pytest.param(_cancel_over_grpc, id="cancelled over gRPC"),
        pytest.param(_let_the_deadline_pass, id="deadline over gRPC"),
    ],
)
async def test_a_turn_is_counted_in_and_out_once(way: Callable[[RouterStack], Awaitable[None]]) -> None:
    async with router_stack(body_limit=100_000) as stack:
        await way(stack)
        admission = stack.router.admission
        await eventually(
            lambda: (admission.turn_count, admission.held_bytes, stack.router.routing.live.load.total) == (0, 0, 0)
        )


# Bytes


async def test_many_large_bodies_at_once_are_held_up_to_the_limit_and_the_rest_refused() -> None:
    async with router_stack(body_limit=10 * MIB, max_held=25 * MIB, max_turns=100) as stack, client_of_many() as client:
        stack.prefill.then(*[_Gauge().slow(0.3) for _ in range(100)])
        text = "x" * (9 * MIB)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, stack.router.admission.held_bytes)
                await asyncio.sleep(0.002)

        watching = asyncio.create_task(watch())
        body = json.dumps(chat_body(text)).encode()

        async def send() -> tuple[int, str]:
            headers = {"content-type": "application/json"}
            async with client.post(f"{stack.url}{CHAT}", data=_pieces(body), headers=headers) as response:
                reply = await response.read()
                return response.status, "" if response.status == 200 else json.loads(reply)["error"]["code"]

        answers = await asyncio.gather(*[send() for _ in range(12)])
        watching.cancel()
        await asyncio.wait([watching])
        assert set(answers) <= {(200, ""), (429, "too_many_bytes")}
        assert (429, "too_many_bytes") in answers
        assert 0 < most <= 25 * MIB
        assert stack.router.admission.held_bytes == 0
        assert await send() == (200, "")


async def test_bodies_over_grpc_count_too() -> None:
    async with router_stack(body_limit=MIB, max_held=MIB) as stack:
        stack.prefill.then(hang())
        async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
            stub = router_pb2_grpc.InferenceServiceStub(channel)
            first = stub.ChatCompletions(grpc_request(pad="x" * 700_000))
            reading = asyncio.ensure_future(first.read())
            await eventually(lambda: stack.router.admission.held_bytes > 700_000)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ChatCompletions(grpc_request(pad="x" * 700_000), timeout=5).read()
            assert to_error(caught.value).reason == "TOO_MANY_BYTES"
            first.cancel()
            await asyncio.wait([reading])
        await eventually(lambda: stack.router.admission.held_bytes == 0)


# Slow clients


async def test_a_body_that_trickles_in_gets_a_408_and_its_connection_is_closed(read: Readings) -> None:
    async with router_stack(receive_timeout_s=0.4) as stack:
        reader, writer = await _half_a_request(stack)
        reply = await asyncio.wait_for(reader.read(), 5)
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in reply.lower()
        assert b'"code":"request_timeout"' in reply
        assert b"0.4 s" in reply
        assert read.counted(instruments.DROPPED_CONNECTIONS) == {("slow_request",): 1}
        assert stack.router.admission.turn_count == 0
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("head", [b"POST ", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_that_trickles_in_gets_a_408_too(read: Readings, head: bytes) -> None:
    async with router_stack(receive_timeout_s=0.3) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
        writer.write(head)
        reply = await asyncio.wait_for(reader.read(), 5)
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert read.counted(instruments.DROPPED_CONNECTIONS) == {("slow_request",): 1}
        writer.close()
        await writer.wait_closed()


async def test_a_connection_between_two_requests_has_no_such_limit() -> None:
    async with router_stack(receive_timeout_s=0.2) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b'"alive"}'), 2)).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.5)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("whole", [False, True])
async def test_a_client_that_does_not_read_stops_its_engine_and_is_cut_off(read: Readings, whole: bool) -> None:
    async with router_stack(send_timeout_s=0.5, idle_timeout_s=30.0) as stack:
        flood = _Flood()
        stack.decode.then(answer({"text": "x" * 30 * MIB}) if whole else flood.step(2000))
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port, limit=1024)
        writer.write(_request(b"false" if whole else b"true"))
        await eventually(lambda: bool(stack.decode.legs))
        await eventually(lambda: stack.router.admission.turn_count == 0, 10)
        assert read.counted(instruments.DROPPED_CONNECTIONS) == {("slow_reader",): 1}
        (leg,) = stack.decode.legs
        if not whole:
            # The pipes between engine and client hold a part of it, however long the client waits.
            await eventually(leg.closed_early.is_set, 2)
            assert flood.sent_bytes < 40 * MIB
        writer.transport.abort()
        del reader
        await eventually(lambda: stack.router.routing.live.load.total == 0)


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    async with router_stack(send_timeout_s=0.5) as stack:
        text = "x" * 12 * MIB
        stack.decode.then(answer({"text": text}))
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port, limit=1024)
        writer.write(_request(b"false"))
        for _ in range(12):
            await asyncio.wait_for(reader.readexactly(MIB), 5)
            await asyncio.sleep(0.1)
        assert (await asyncio.wait_for(reader.readuntil(b'"}'), 5)).strip(b"x") == b'"}'
        writer.close()
        await writer.wait_closed()


async def test_a_grpc_client_that_does_not_read_is_cut_off_with_a_status(read: Readings) -> None:
    async with router_stack(send_timeout_s=0.5, idle_timeout_s=30.0) as stack:
        stack.decode.then(_Flood().step(1000))
        async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
            call = router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(grpc_request(stream=True))
            await call.read()
            await eventually(lambda: stack.router.admission.turn_count == 0, 10)
            await eventually(stack.decode.legs[0].closed_early.is_set, 2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [step async for step in call]
        assert to_error(caught.value).reason == "SLOW_READER"
        assert read.counted(instruments.DROPPED_CALLS) == {(): 1}


async def test_a_grpc_client_that_takes_not_even_the_first_step_is_cut_off() -> None:
    async with router_stack(send_timeout_s=0.5, idle_timeout_s=30.0) as stack:
        stack.decode.then(_Flood().step(1000))
        smallest_window = (("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.router.grpc_port}", smallest_window) as channel:
            call = router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(grpc_request(stream=True))
            await eventually(lambda: bool(stack.decode.legs), 10)
            await eventually(lambda: stack.router.admission.turn_count == 0, 10)
            call.cancel()


async def test_a_grpc_client_that_was_cut_off_may_be_gone_before_it_is_told() -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    async with router_stack(send_timeout_s=0.3, idle_timeout_s=30.0) as stack:
        stack.decode.then(_Flood().step(1000))
        async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
            call = router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(grpc_request(stream=True))
            await call.read()
            await eventually(lambda: stack.router.admission.turn_count == 0, 10)
            call.cancel()
    gc.collect()
    assert faults == []


# Connections


async def test_beyond_the_limit_of_connections_the_oldest_idle_one_makes_room(read: Readings) -> None:
    async with router_stack(max_connections=5) as stack:
        idle = [await asyncio.open_connection("127.0.0.1", stack.router.http_port) for _ in range(5)]
        for reader, writer in idle[:2]:
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b'"alive"}')
        assert (await stack.chat("hi")).status == 200
        assert await asyncio.wait_for(idle[0][0].read(), 2) == b""
        assert read.counted(instruments.DROPPED_CONNECTIONS) == {("idle",): 1}
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()


async def test_when_none_is_idle_a_new_connection_is_told_so(read: Readings) -> None:
    async with router_stack(max_connections=3) as stack, client_of_many() as client:
        stack.prefill.then(*[hang() for _ in range(3)])
        running = [asyncio.create_task(post(client, stack)) for _ in range(3)]
        await eventually(lambda: stack.router.admission.turn_count == 3)
        for size in (10, 3 * MIB):
            reply = await asyncio.to_thread(_blocking, stack.router.http_port, "x" * size)
            assert reply.startswith(b"HTTP/1.1 429 ")
            assert b"\r\nretry-after: 1\r\n" in reply
            assert b"3 connections are open, which is this router's limit" in reply
        assert read.counted(instruments.DROPPED_CONNECTIONS) == {("too_many",): 2}
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await eventually(lambda: stack.router.admission.turn_count == 0)
        assert (await stack.chat("hi")).status == 200


def _blocking(port: int, text: str) -> bytes:
    """Sends all of a request before it reads anything."""
    body = json.dumps(chat_body(text)).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(_head(len(body)) + b"\r\n\r\n" + body)
        return connection.makefile("rb").read()


class _Gauge:
    """Counts requests that an engine works on at once."""

    def __init__(self) -> None:
        self.running = self.most = 0

    def slow(self, seconds: float) -> Step:
        async def step(request: web.Request, leg: Leg) -> web.StreamResponse | None:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await asyncio.sleep(seconds)
            finally:
                self.running -= 1
            return None

        return step


class _Flood:
    """Streams as much as its connection takes."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def step(self, count: int) -> Step:
        event = b"data: " + b"x" * 64 * 1024 + b"\n\n"

        async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(count):
                await response.write(event)
                self.sent_bytes += len(event)
            await response.write_eof()
            return response

        return step


def _request(stream: bytes) -> bytes:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"stream":%s}' % stream
    return b"%s\r\n\r\n%s" % (_head(len(body)), body)


def _head(length: int) -> bytes:
    return f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}".encode()


async def _half_a_request(stack: RouterStack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write(_head(100) + b"\r\n\r\n" + b" " * 50)
    return reader, writer


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), MIB):
        yield body[start : start + MIB]


# Open files


async def test_a_router_that_may_open_few_files_serves_within_them_and_refuses_the_rest() -> None:
    async with (
        FakeDirectory() as directory,
        FakeOwner() as owner,
        FakeEngine("prefill") as prefill,
        FakeEngine("decode") as decode,
        client_of_many() as client,
    ):
        for engine in (prefill, decode):
            await directory.add(engine, agent=owner.address)
        async with _router_with(64, directory.address) as (port, told):
            url = f"http://127.0.0.1:{port}{CHAT}"

            async def ask() -> tuple[int, str]:
                async with client.post(url, json=chat_body("hi")) as response:
                    return response.status, await response.text()

            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(120)]
            assert (await asyncio.wait_for(ask(), 10))[0] == 200
            for _, writer in idle:
                writer.close()
            decode.then(*[_Gauge().slow(0.3) for _ in range(60)])
            answers = await asyncio.gather(*[ask() for _ in range(60)], return_exceptions=True)
            served = [each for each in answers if isinstance(each, tuple)]
            assert {status for status, _ in served} == {200, 429}
            assert all("limit" in text for status, text in served if status == 429)
            assert (await asyncio.wait_for(ask(), 10))[0] == 200
    assert "limit on open files too low, taking fewer connections and turns" in "".join(told)
    assert "out of system resource" not in "".join(told)
    assert "Too many open files" not in "".join(told)


@contextlib.asynccontextmanager
async def _router_with(files: int, registry: str) -> AsyncIterator[tuple[int, list[str]]]:
    """Runs a router process that may open so many files; yields its port, and its log as it grows."""
    addresses = ("--listen-http", "127.0.0.1:0", "--listen-grpc", "127.0.0.1:0", "--registry", registry)
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", f'ulimit -n {files}; exec "$0" -m backhaul_router "$@"', sys.executable),
        *(*addresses, "--lookup-budget-s", "1", "--lame-duck-s", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    told: list[str] = []
    port = 0
    try:
        while not port or '"ready": true' not in told[-1]:
            told.append((await asyncio.wait_for(process.stdout.readline(), 20)).decode())
            assert told[-1], told
            port = port or json.loads(told[-1]).get("http_port", 0)
        yield port, told
    finally:
        process.terminate()
        told.append((await process.stdout.read()).decode())
        await process.wait()
