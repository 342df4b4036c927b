"""Edges of HTTP: connections that close, odd answers of engines, keys, headers, and clients that read strictly."""

import asyncio
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import grpc
import h11
import pytest
from aiohttp import web
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_router import engine_client
from backhaul_router.http_listener import listen
from backhaul_router.http_protocol import ApiServer, ClientLimits
from tests.fakes.complaints import complaints
from tests.fakes.engine import FakeEngine, Leg, Step, answer, bare_500, event_of, raw_stream, refuse, reset
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


# Connections


async def test_engines_that_close_idle_connections_just_when_they_are_used_cost_no_request() -> None:
    """Sooner than vLLM, and sooner than the router expects."""
    prefill, decode = FakeEngine("prefill", keepalive_s=0.1), FakeEngine("decode", keepalive_s=0.1)
    async with router_stack(prefill=prefill, decode=decode) as stack:

        async def client(pause_s: float) -> set[int]:
            statuses = set()
            for index in range(12):
                statuses.add((await stack.chat("hi", stream=bool(index % 2))).status)
                await asyncio.sleep(pause_s)
            return statuses

        pauses = [0.094, 0.096, 0.098, 0.1, 0.101, 0.102, 0.104]
        assert await asyncio.gather(*map(client, pauses)) == [{200}] * len(pauses)


async def test_many_streams_twice_with_cancels_between_and_no_connection_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "KEEP_ALIVE_S", 0.3)
    async with router_stack() as stack, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        stack.decode.chunk_gate = asyncio.Event()

        async def one() -> int:
            async with client.post(f"{stack.url}{CHAT}", json=chat_body("hi", stream=True)) as response:
                await response.read()
                return response.status

        async def wave() -> list[int]:
            gate = stack.decode.chunk_gate = asyncio.Event()
            streams = [asyncio.create_task(one()) for _ in range(150)]
            await eventually(lambda: stack.router.admission.turn_count == 150, 20)
            gate.set()
            return await asyncio.gather(*streams)

        assert set(await wave()) == {200}
        stack.decode.chunk_gate = asyncio.Event()
        cancelled = [asyncio.create_task(one()) for _ in range(50)]
        await eventually(lambda: stack.router.admission.turn_count == 50, 20)
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        assert set(await wave()) == {200}
        await eventually(lambda: stack.router.routing.live.load.total == stack.router.admission.turn_count == 0)
        await eventually(lambda: stack.prefill.connection_count == stack.decode.connection_count == 0)


async def test_a_gateways_idle_connection_is_kept_for_longer_than_the_gateway_does() -> None:
    """An hour is what common gateways wait at most before they close it themselves."""
    limits = ClientLimits(body_bytes=1, receive_s=1, send_s=1, connections=1, goodbyes=1)
    connection = ApiServer(_refuse_all, limits=limits)()
    assert connection.keepalive_timeout > 3600


@pytest.mark.parametrize("closing", [b"", b"connection: close\r\n"])
async def test_the_last_bytes_of_an_answer_that_nobody_takes_keep_no_connection(closing: bytes) -> None:
    limits = ClientLimits(body_bytes=1, receive_s=9, send_s=0.2, connections=9, goodbyes=9)
    loop, server = asyncio.get_running_loop(), ApiServer(_48_kib, limits=limits)
    listener = await loop.create_server(server, "127.0.0.1", 0)
    with socket.socket() as client:
        for small in (listener.sockets[0], client):
            small.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024)
        client.setblocking(False)
        await loop.sock_connect(client, listener.sockets[0].getsockname())
        await eventually(lambda: len(server.connections) == 1)
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n" + closing + b"\r\n")
        await eventually(lambda: server.requests_count == 1)
        await eventually(lambda: not server.connections)
    listener.close()


async def test_connections_that_clients_have_when_the_port_closes_are_served() -> None:
    server = ApiServer(_48_kib, limits=_FEW)
    listener = await listen(server, "127.0.0.1:0", None)
    # The event loop does not run: nobody has accepted them.
    clients = [_asking(listener.port) for _ in range(9)]
    await listener.close()
    answers = [await asyncio.to_thread(client.recv, 64) for client in clients]
    assert {answer[:15] for answer in answers} == {b"HTTP/1.1 200 OK"}
    with pytest.raises(ConnectionRefusedError):
        _asking(listener.port)
    await _ended(server, clients)


async def test_a_client_that_asks_while_idle_connections_are_closed_is_answered() -> None:
    server = ApiServer(_48_kib, limits=_FEW)
    listener = await listen(server, "127.0.0.1:0", None)
    clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(3)]
    await eventually(lambda: len(server.connections) == 3)
    clients[1].sendall(_ASK)
    assert server.close_idle()
    answers = [await asyncio.to_thread(client.recv, 15) for client in clients]
    assert answers == [b"", b"HTTP/1.1 200 OK", b""]
    assert not server.close_idle()
    await listener.close()
    await _ended(server, clients)


async def test_room_is_made_by_a_connection_on_which_nobody_asks() -> None:
    server = ApiServer(_48_kib, limits=replace(_FEW, connections=2))
    listener = await listen(server, "127.0.0.1:0", None)
    clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(2)]
    await eventually(lambda: len(server.connections) == 2)
    clients[0].sendall(_ASK)
    assert server.make_room()
    answers = [await asyncio.to_thread(client.recv, 15) for client in clients]
    assert answers == [b"HTTP/1.1 200 OK", b""]
    await listener.close()
    await _ended(server, clients)


_FEW = ClientLimits(body_bytes=1, receive_s=9, send_s=9, connections=9, goodbyes=9)
_ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def _asking(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(_ASK)
    return client


async def _ended(server: ApiServer, clients: list[socket.socket]) -> None:
    for client in clients:
        client.close()
    await eventually(lambda: not server.connections)


async def _48_kib(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=b"x" * 48 * 1024)


# Odd answers of engines


async def test_prefills_answer_may_come_in_any_pieces(stack: RouterStack) -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 22, 333]], "remote_engine_id": "引擎 👋🏽"}
    stack.prefill.then(_byte_by_byte({"choices": [], "kv_transfer_params": params}))
    assert (await stack.chat("hi")).status == 200
    (leg,) = stack.decode.legs
    assert leg.params is not None
    assert {name: leg.params[name] for name in params} == params


def _whole(body: bytes, **headers: str) -> bytes:
    lines = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        pytest.param(_whole(b'{"id":"x"}', content_length="10", connection="close"), '{"id":"x"}', id="length"),
        pytest.param(_whole(b'{"id":"x"}', connection="close"), '{"id":"x"}', id="until it closes"),
        pytest.param(_whole(b'a\r\n{"id":"x"}\r\n0\r\n\r\n', transfer_encoding="chunked"), '{"id":"x"}', id="chunked"),
        pytest.param(
            _whole(
                gzip.compress(b'{"id":"x"}'),
                content_encoding="gzip",
                content_length=str(len(gzip.compress(b'{"id":"x"}'))),
            ),
            '{"id":"x"}',
            id="compressed although nobody asked",
        ),
        pytest.param(
            _whole(
                b'14\r\n{"kv_transfer_params"\r\nc\r\n:{},"id":"x"\r\n1\r\n}\r\n0\r\n\r\n',
                transfer_encoding="chunked",
                x_ratelimit_limit="1",
                server="uvicorn",
            ).replace(b"14\r\n", b"15\r\n"),
            '{"id":"x"}',
            id="rewritten",
        ),
    ],
)
async def test_a_strict_client_reads_whole_answers(stack: RouterStack, sent: bytes, text: str) -> None:
    stack.decode.then(_raw(sent))
    status, headers, body = await strictly(stack, {**chat_body("hi")})
    assert (status, body.decode()) == (200, text)
    assert headers["content-length"] == str(len(text))
    assert not {"transfer-encoding", "content-encoding", "server-timing"} & set(headers)


async def test_an_answer_with_a_length_and_in_chunks_is_not_trusted(stack: RouterStack) -> None:
    """The two can be made to disagree: what one reader takes for the end is not the end for another."""
    body = _whole(b"5\r\nhello\r\n0\r\n\r\n", transfer_encoding="chunked", content_length="5")
    stack.decode.then(_raw(body), _raw(body))
    status, headers, answer = await strictly(stack, chat_body("hi"))
    assert status == 502
    assert headers["content-length"] == str(len(answer))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_strict_client_reads_errors_and_streams(stack: RouterStack, stream: bool) -> None:
    stack.decode.then(refuse(400, "too long: 你好", {"x-ratelimit-remaining-tokens": "0"}))
    status, headers, body = await strictly(stack, chat_body("hi", stream=stream))
    assert (status, headers["content-length"]) == (400, str(len(body)))
    assert headers["x-ratelimit-remaining-tokens"] == "0"
    assert stack.decode.legs[0].headers["accept-encoding"] == "identity"
    assert json.loads(body)["error"]["message"] == "too long: 你好"
    status, headers, body = await strictly(stack, chat_body("hi", stream=True))
    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    assert "content-length" not in headers
    assert body.startswith(event_of("Hel"))


@pytest.mark.parametrize("status", [301, 307])
async def test_a_redirection_is_no_answer(stack: RouterStack, status: int) -> None:
    location = {"location": "http://169.254.169.254/"}
    stack.decode.then(*[refuse(status, "elsewhere", location) for _ in range(2)])
    got = await stack.chat("hi")
    assert got.status in (502, 503)
    assert "location" not in got.headers


async def test_a_conversation_with_another_picture_is_another_conversation(stack: RouterStack) -> None:
    """Equal words and equal placeholders: only the picture differs. (The connector compares the engine's own hash.)"""

    def turn(picture: str, *more: str) -> dict[str, Any]:
        url = {"url": f"data:image/png;base64,{picture}"}
        body = chat_body("look", *more)
        body["messages"][0]["content"] = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": url}]
        return body

    await stack.post(CHAT, turn("AAAA"))
    (leg,) = stack.decode.legs
    assert leg.params is not None
    stack.hold()
    stack.publish(leg.params["backhaul"]["keys"][0])
    assert (await stack.post(CHAT, turn("BBBB", "nice", "more"))).miss == "not_found"
    assert (await stack.post(CHAT, turn("AAAA", "nice", "more"))).route == "warm"


# Keys and headers


async def test_the_clients_key_reaches_every_leg_and_neither_log_nor_trace(
    spans: InMemorySpanExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = FakeEngine("prefill", api_key="sk-secret"), FakeEngine("decode", api_key="sk-secret")
    async with router_stack(prefill=prefill, decode=decode) as stack:
        headers = {"authorization": "Bearer sk-secret"}
        stack.hold("one")
        stack.hold("two")
        stack.publish(label_key("hi"), "one")
        stack.publish(label_key("hi"), "two")
        prefill.then(reset())
        decode.then(bare_500())
        assert (await stack.chat("hi", "hello", "more", headers=headers)).status == 200
        assert (await stack.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers)).status == 200
        async with stack.client.get(f"{stack.url}/v1/models", headers=headers) as response:
            assert response.status == 200
        assert (await stack.chat("hi", headers={"authorization": "Bearer sk-secreT"})).status == 401
        legs = [*prefill.legs, *decode.legs]
        assert len(legs) >= 7
        assert {leg.headers["authorization"] for leg in legs} == {"Bearer sk-secret", "Bearer sk-secreT"}
        told = "".join(capsys.readouterr()) + "".join(span.to_json() for span in spans.get_finished_spans())
        assert "first_turn" in told
        assert "sk-secre" not in told
        assert "sk-secre" not in str(stack.directory.lookups) + str(stack.owner.claims)


async def test_models_of_all_live_engines_and_what_becomes_of_requests_for_them(stack: RouterStack) -> None:
    other = await stack.add(FakeEngine("decode", models=("other",)))
    await stack.add(FakeEngine("prefill", models=("other",)))

    async def listed() -> dict[str, Any]:
        async with stack.client.get(f"{stack.url}/v1/models") as response:
            return {entry["id"]: entry for entry in (await response.json())["data"]}

    models = await listed()
    assert set(models) == {"tiny", "other"}
    assert models["other"]["max_model_len"] == 4096
    assert (await stack.chat("hi", model="other")).status == 200
    await stack.lose(other)
    got = await stack.chat("hi", model="other")
    assert (got.status, json.loads(got.body)["error"]["code"]) == (503, "no_capacity")
    got = await stack.chat("hi", model="nobody's")
    assert (got.status, json.loads(got.body)["error"]["code"]) == (404, "model_not_found")
    assert (await stack.chat("hi")).status == 200


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 9000 + b"\r\n\r\n", id="header"),
        pytest.param(b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", id="path"),
    ],
)
async def test_a_head_that_is_too_long_is_told_the_limit(stack: RouterStack, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write(head)
    reply = await asyncio.wait_for(reader.read(), 5)
    assert reply.split(b" ", 2)[1] == b"431"
    assert b'"code":"headers_too_large"' in reply
    assert b"8190 bytes" in reply
    writer.close()
    await writer.wait_closed()


async def test_a_compressed_body_is_limited_by_what_it_becomes() -> None:
    async with router_stack(body_limit=100_000) as stack:
        data = gzip.compress(json.dumps(chat_body("x" * 10_000_000)).encode())
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        async with stack.client.post(f"{stack.url}{CHAT}", data=data, headers=headers) as response:
            assert response.status == 413
            assert "100000 bytes" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 413)])
async def test_the_limit_of_a_body_is_the_same_over_http_and_grpc(more: int, status: int) -> None:
    async with router_stack(body_limit=50_000) as stack:
        body = json.dumps(chat_body("hi")).encode()
        body += b" " * (50_000 + more - len(body))
        headers = {"content-type": "application/json"}
        async with stack.client.post(f"{stack.url}{CHAT}", data=body, headers=headers) as response:
            over_http = await response.read()
            assert response.status == status
        async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
            stub = router_pb2_grpc.InferenceServiceStub(channel)
            call = stub.ChatCompletions(router_pb2.ChatCompletionsRequest(body=body), timeout=5)
            if not more:
                assert len([step async for step in call]) == 2
                return
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        error = to_error(caught.value)
        assert (error.reason, error.metadata) == ("BODY_LIMIT", {"limit": "50000"})
        assert error.message == json.loads(over_http)["error"]["message"]


async def strictly(stack: RouterStack, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """Sends a chat and reads the answer with a parser that forgives nothing."""
    client = h11.Connection(h11.CLIENT)
    data = json.dumps(body).encode()
    headers = [("host", "x"), ("content-type", "application/json"), ("content-length", str(len(data)))]
    headers += [("accept-encoding", "gzip, br")]
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write(client.send(h11.Request(method="POST", target=CHAT, headers=headers)) or b"")
    writer.write((client.send(h11.Data(data)) or b"") + (client.send(h11.EndOfMessage()) or b""))
    status, got, received = 0, {}, b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            client.receive_data(await asyncio.wait_for(reader.read(65536), 5))
        elif isinstance(event, h11.Response):
            status, got = event.status_code, {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            received += event.data
    writer.close()
    await writer.wait_closed()
    return status, got, received


def _raw(data: bytes) -> Step:
    """Sends exactly these bytes and closes."""

    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        transport.write(data)
        transport.close()
        raise ConnectionResetError

    return step


def _byte_by_byte(document: dict[str, Any]) -> Step:
    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        for byte in json.dumps(document, ensure_ascii=False).encode():
            await response.write(bytes([byte]))
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    return step


async def _refuse_all(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(status=500)


# Bodies that are not what their headers say


async def _sent(stack: RouterStack, head: bytes, body: bytes, *, ends: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    writer.write(head + body)
    if ends:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()
        await writer.wait_closed()


def _head(path: str, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *headers)
    return "\r\n".join((*lines, "", "")).encode()


@pytest.mark.parametrize("count", ["content-length: 500", "transfer-encoding: chunked"])
async def test_a_body_that_its_client_does_not_finish_ends_at_once(stack: RouterStack, count: str) -> None:
    reply = await _sent(stack, _head(CHAT, count), b"10\r\n{", ends=True)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"ended before its announced length" in reply
    assert stack.router.admission.turn_count == 0


async def test_a_large_packed_body_may_be_the_last_that_its_client_sends(stack: RouterStack) -> None:
    body = gzip.compress(json.dumps(chat_body("hi " * 1_000_000)).encode())
    reply = await _sent(stack, _head(CHAT, "content-encoding: gzip", f"content-length: {len(body)}"), body, ends=True)
    assert b"HTTP/1.1 200 " in reply


@pytest.mark.parametrize("path", [CHAT, "/v1/nothing"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_a_body_in_another_encoding_than_it_says_is_no_fault_of_the_router(
    stack: RouterStack, caplog: pytest.LogCaptureFixture, encoding: str, path: str
) -> None:
    reply = await _sent(stack, _head(path, f"content-encoding: {encoding}", "content-length: 5"), b"abcde")
    assert reply.split()[1] in (b"400", b"404")
    assert complaints(caplog, level=logging.ERROR) == []


async def test_broken_chunks_are_no_fault_of_the_router(stack: RouterStack, caplog: pytest.LogCaptureFixture) -> None:
    reply = await _sent(stack, _head(CHAT, "transfer-encoding: chunked"), b"zz\r\nabc\r\n")
    assert reply.split()[1] == b"400"
    assert complaints(caplog, level=logging.ERROR) == []


# Answers that are no HTTP, not whole, or too large


def _status(line: bytes) -> bytes:
    return b"HTTP/1.1 " + line + b"\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(_status(b"999 X"), id="999"),
        pytest.param(_status(b"600 X"), id="600"),
        pytest.param(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", id="101"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", id="204"),
        pytest.param(_whole(b'{"id":"x","choi', connection="close"), id="half a document"),
        pytest.param(_whole(b'["id"]', content_length="6"), id="no object"),
    ],
)
async def test_what_is_no_answer_is_an_engines_fault(stack: RouterStack, sent: bytes) -> None:
    stack.decode.then(_raw(sent), _raw(sent))
    got = await stack.chat("hi")
    assert (got.status, json.loads(got.body)["error"]["code"]) == (502, "engine_failed")


async def test_kinds_of_content_are_the_same_in_capitals(stack: RouterStack) -> None:
    begun = b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream; charset=utf-8\r\n\r\n" + event_of("Hel")
    stack.decode.then(_raw_and_wait(begun))
    async with stack.client.post(f"{stack.url}{CHAT}", json=chat_body("hi", stream=True)) as response:
        assert await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5) == event_of("Hel")


def _raw_and_wait(sent: bytes) -> Step:
    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(sent)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return step


async def test_a_whole_answer_is_read_up_to_a_limit() -> None:
    async with router_stack(answer_limit=100_000) as stack:
        stack.decode.then(answer({"text": "x" * 99_000}), answer({"text": "x" * 100_000}))
        assert (await stack.chat("hi")).status == 200
        got = await stack.chat("hi")
        error = json.loads(got.body)["error"]
        assert (got.status, error["code"]) == (502, "answer_too_large")
        assert "larger than 100000 bytes" in error["message"]
        assert len(stack.decode.legs) == 2
        stack.prefill.then(answer({"text": "x" * 100_000}))
        assert (await stack.chat("hi")).status == 502
        stack.decode.then(raw_stream(stack.decode, [event_of("x" * 60_000)] * 3))
        assert (await stack.chat("hi", stream=True)).body.endswith(b"[DONE]\n\n")


# Streams


@pytest.mark.parametrize("last", [b"", b"data: [DO", b'data: {"choices": [{"del', b'data: {"choices": []}\n\n'])
async def test_a_stream_that_ends_without_saying_so_is_broken(stack: RouterStack, last: bytes) -> None:
    for _ in range(2):
        stack.decode.then(raw_stream(stack.decode, [event_of("Hel"), last], done=False))
    got = await stack.chat("hi", stream=True)
    assert got.body.startswith(event_of("Hel"))
    events = got.body.split(b"\n\n")
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        request = router_pb2.ChatCompletionsRequest(body=json.dumps(chat_body("hi", stream=True)).encode())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [step async for step in router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(request)]
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_no_event_carries_handles(stack: RouterStack) -> None:
    params = b'"kv_transfer_params": {"remote_host": "10.0.0.9"}, '
    event = event_of("Hel").replace(b'"choices"', params + b'"choices"')
    stack.decode.then(raw_stream(stack.decode, [event[:70], event[70:]]))
    got = await stack.chat("hi", stream=True)
    assert b"10.0.0.9" not in got.body
    assert json.loads(got.body.split(b"\n\n")[0].removeprefix(b"data: ")) == json.loads(event_of("Hel")[6:])
