"""A whole router over TLS: its clients, a gateway, registries, agents and engines."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from backhaul.envoy.v3 import ext_proc_pb2, ext_proc_pb2_grpc
from backhaul.router.v1 import gateway_pb2, gateway_pb2_grpc, router_pb2, router_pb2_grpc
from backhaul_common.grpc_client import open_channel
from backhaul_common.tls import CallerContext, Identity, TlsFiles
from backhaul_common.tls import identity as identities
from backhaul_local.certificates import Authority, name_of
from backhaul_router.http_listener import listen
from backhaul_router.http_protocol import ApiServer, ClientLimits
from tests.fakes.certificates import OVER, both, identity, settings, take
from tests.fakes.engine import FakeEngine, answer, hang
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack
from tests.integration.test_router_turns import label_key


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


@asynccontextmanager
async def secure_stack(authority: Authority, **options: Any) -> AsyncIterator[RouterStack]:
    """All of it under certificates of one CA; the client shows none."""
    others = identity(authority.issue("others"), authority)
    options = {"client_tls": identity(None, authority), **settings(authority.issue("router"), authority), **options}
    async with router_stack(tls=others, **options) as stack:
        yield stack


async def test_turns_are_cold_and_warm_as_ever(authority: Authority) -> None:
    async with secure_stack(authority) as stack:
        stack.hold()
        stack.publish(label_key("hi"))
        got = [await stack.chat("hi", stream=True), await stack.chat("hi", "hello", "more", stream=True)]
        assert [(one.status, one.route) for one in got] == [(200, "cold"), (200, "warm")]
        assert all(b"Hel" in one.body and b"[DONE]" in one.body for one in got)


@pytest.mark.parametrize("chunks", [1, 2])
async def test_a_turn_is_over_as_soon_as_its_client_has_all_of_it(authority: Authority, chunks: int) -> None:
    async with secure_stack(authority) as stack:
        stack.decode.chunk_gate = asyncio.Event() if chunks == 2 else None
        async with stack.client.post(f"{stack.url}{CHAT}", json=chat_body("hi", stream=True)) as answer:
            await answer.content.readany()
            if stack.decode.chunk_gate:
                stack.decode.chunk_gate.set()
            await answer.read()
        await eventually(lambda: stack.router.admission.turn_count == 0)


async def test_clients_that_have_connected_when_the_port_closes_are_served(authority: Authority) -> None:
    limits = ClientLimits(body_bytes=1, receive_s=9, send_s=9, connections=9, goodbyes=9)
    server = ApiServer(_says_hello, limits=limits)
    listener = await listen(server, "127.0.0.1:0", identity(authority.issue("router")))
    # The event loop does not run: nobody has accepted it.
    connection = socket.create_connection(("127.0.0.1", listener.port))

    def ask() -> bytes:
        context = ssl.create_default_context(cafile=authority.path)
        with context.wrap_socket(connection, server_hostname="127.0.0.1") as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            return client.recv(15)

    asking = asyncio.create_task(asyncio.to_thread(ask))
    await listener.close()
    assert await asking == b"HTTP/1.1 200 OK"
    await eventually(lambda: not server.connections)


async def _says_hello(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="hello")


async def test_the_grpc_api_takes_turns_too(authority: Authority) -> None:
    async with secure_stack(authority) as stack:
        address = f"127.0.0.1:{stack.router.grpc_port}"
        assert b"Hel" in await over_grpc(address, identity(None, authority))
        with pytest.raises(grpc.aio.AioRpcError):
            await over_grpc(address, None)


async def over_grpc(address: str, tls: Identity | None) -> bytes:
    request = router_pb2.ChatCompletionsRequest(body=json.dumps(chat_body("hi", stream=True)).encode())
    async with open_channel(address, tls) as channel:
        steps = router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(request, timeout=10)
        return b"".join([step.chunk async for step in steps])


async def test_where_clients_need_certificates_only_those_of_their_ca_are_let_in(
    authority: Authority, stranger: Authority
) -> None:
    clients, shown = stranger, identity(stranger.issue("client"), authority)
    async with secure_stack(authority, client_tls=shown, client_ca=str(clients.path)) as stack:
        assert (await stack.chat("hi")).status == 200
        address = f"127.0.0.1:{stack.router.grpc_port}"
        assert await over_grpc(address, shown)
        for refused in (
            identity(authority.issue("router2"), authority),
            identity(clients.issue("old", life=OVER), authority),
            identity(None, authority),
        ):
            with pytest.raises(aiohttp.ClientError):
                await over_http(stack.url, refused)
            with pytest.raises(grpc.aio.AioRpcError):
                await over_grpc(address, refused)
        with pytest.raises(aiohttp.ClientError):
            await over_http(stack.url.replace("https", "http"), None)
        assert len(stack.decode.legs) == 2


async def over_http(url: str, tls: Identity | None) -> int:
    context = CallerContext(tls).current() if tls else True
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}{CHAT}", json=chat_body("hi"), ssl=context) as got,
    ):
        await got.read()
        return got.status


async def test_a_client_refuses_a_router_of_another_ca_or_whose_certificate_is_over(
    authority: Authority, stranger: Authority
) -> None:
    async with secure_stack(authority) as stack:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await over_http(stack.url, identity(None, stranger))


async def test_only_gateways_of_an_accepted_name_have_endpoints_picked(
    authority: Authority, stranger: Authority
) -> None:
    names = {"tls_callers": (name_of("gateway"),), "listen_ext_proc": "127.0.0.1:0"}
    async with secure_stack(authority, **names) as stack:
        address = f"127.0.0.1:{stack.router.ext_proc_port}"
        gateway, agent = (identity(authority.issue(role), authority) for role in ("gateway", "agent"))
        assert await picks(address, gateway) == "OK"
        assert await picks(address, agent) == "PERMISSION_DENIED"
        for refused in (identity(stranger.issue("gateway"), authority), identity(None, authority), None):
            assert await picks(address, refused) == "UNAVAILABLE"


async def picks(address: str, tls: Identity | None) -> str:
    """Begins a request without a body, which is answered at once."""
    headers = ext_proc_pb2.HttpHeaders(end_of_stream=True)
    async with open_channel(address, tls) as channel:
        requests = iter([ext_proc_pb2.ProcessingRequest(request_headers=headers)])
        call: Any = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process(requests, timeout=10)
        try:
            assert (await call.read()).HasField("immediate_response")
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


async def test_only_gateways_of_an_accepted_name_have_turns_planned(authority: Authority, stranger: Authority) -> None:
    names = {"tls_callers": (name_of("gateway"),), "listen_gateway": "127.0.0.1:0"}
    async with secure_stack(authority, **names) as stack:
        address = f"127.0.0.1:{stack.router.gateway_port}"
        gateway, agent = (identity(authority.issue(role), authority) for role in ("gateway", "agent"))
        assert await reports(address, gateway) == "INVALID_ARGUMENT"
        assert await reports(address, agent) == "PERMISSION_DENIED"
        for refused in (identity(stranger.issue("gateway"), authority), identity(None, authority), None):
            assert await reports(address, refused) == "UNAVAILABLE"


async def reports(address: str, tls: Identity | None) -> str:
    """Reports on a turn that has no name, which is refused at once by whoever listens to it."""
    async with open_channel(address, tls) as channel:
        call: Any = gateway_pb2_grpc.GatewayServiceStub(channel).ReportTurn(gateway_pb2.ReportTurnRequest(), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code().name


@pytest.mark.parametrize("role", ["of another CA", "expired", "without TLS"])
async def test_an_engine_that_cannot_prove_itself_gets_nothing(
    authority: Authority, stranger: Authority, role: str
) -> None:
    shown: dict[str, Callable[[], Identity | None]] = {
        "of another CA": lambda: identity(stranger.issue("engine"), authority),
        "expired": lambda: identity(authority.issue("old", life=OVER), authority),
        "without TLS": lambda: None,
    }
    decode = FakeEngine("decode", tls=shown[role]())
    async with secure_stack(authority, decode=decode) as stack:
        node = next(node for node in stack.directory.nodes.values() if node.engine_url == decode.url)
        node.engine_url = f"https://127.0.0.1:{decode.port}"
        await stack.directory.put(node)
        await eventually(lambda: any(listed.engine_url == node.engine_url for listed in stack.router.table))
        assert (await stack.chat("hi")).status == 503
        assert decode.legs == []


async def test_engines_may_have_a_ca_of_their_own(authority: Authority, stranger: Authority) -> None:
    # They ask for the router's certificate, which is of the services' CA.
    engines = identity(stranger.issue("engine"), authority)
    parts = {"prefill": FakeEngine("prefill", tls=engines), "decode": FakeEngine("decode", tls=engines)}
    async with secure_stack(authority, engine_ca=str(stranger.path), **parts) as stack:
        assert (await stack.chat("hi")).status == 200


async def test_an_owner_that_cannot_prove_itself_is_not_claimed_from(authority: Authority, stranger: Authority) -> None:
    async with secure_stack(authority, tls_agent_name=name_of("agent")) as stack:
        stack.hold()
        stack.publish(label_key("hi"))
        # What is there is shown as "others".
        got = await stack.chat("hi", "hello", "more")
        assert (got.status, got.route, got.miss) == (200, "cold", "owner_unavailable")
        assert stack.owner.claims == []


async def test_a_client_that_leaves_ends_its_turn_and_nothing_is_logged(authority: Authority) -> None:
    async with secure_stack(authority) as stack:
        stack.decode.then(hang())
        with capture_logs() as logs:
            asked = asyncio.create_task(stack.chat("hi", stream=True))
            await eventually(lambda: bool(stack.decode.legs))
            asked.cancel()
            async with asyncio.timeout(10):
                await stack.decode.legs[0].closed_early.wait()
        assert [log for log in logs if log["log_level"] in ("warning", "error")] == []


async def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_it_within_two_seconds(authority: Authority) -> None:
    async with secure_stack(authority) as stack:
        stack.decode.chunk_gate = asyncio.Event()
        url = f"{stack.url}/v1/chat/completions"
        async with stack.client.post(url, json=chat_body("hi", stream=True)) as response:
            await response.content.readany()
        async with asyncio.timeout(2):
            await stack.decode.legs[0].closed_early.wait()


async def test_slow_clients_lose_their_connection_as_ever(authority: Authority) -> None:
    async with secure_stack(authority, receive_timeout_s=0.3, send_timeout_s=0.5, idle_timeout_s=30.0) as stack:
        context = CallerContext(identity(None, authority)).current()
        reader, writer = await _connected(stack, context)
        writer.write(b"POST ")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 408 ")
        writer.transport.abort()

        stack.decode.then(answer({"text": "x" * 30 * 1024 * 1024}))
        reader, writer = await _connected(stack, context)
        body = json.dumps(chat_body("hi")).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await eventually(lambda: bool(stack.decode.legs))
        await eventually(lambda: stack.router.admission.turn_count == 0, 10)
        writer.transport.abort()


async def _connected(stack: RouterStack, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", stack.router.http_port, limit=1024, ssl=context)


async def test_a_stream_goes_on_when_everything_is_replaced_under_it(
    authority: Authority, stranger: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, "LOOK_S", 0.02)
    ca = both(tmp_path / "ca.pem", authority)
    router, others = (authority.issue(role) for role in ("router", "others"))
    parts = Identity("others", TlsFiles(cert=str(others.cert), key=str(others.key), ca=str(ca)))
    client, gate = Identity("client", TlsFiles(ca=str(ca))), asyncio.Event()
    files: dict[str, Any] = {"tls_cert": str(router.cert), "tls_key": str(router.key), "tls_ca": str(ca)}
    async with router_stack(tls=parts, client_tls=client, **files) as stack:
        stack.decode.chunk_gate = gate
        url, body = f"{stack.url}{CHAT}", chat_body("hi", stream=True)
        async with stack.client.post(url, json=body) as running:
            first = await running.content.readany()
            both(ca, stranger)
            for pair in (router, others):
                take(stranger.issue(f"next-{pair.cert.stem}"), pair)
            parts.look()
            client.look()
            await eventually(lambda: _turn_works(stack.url, client))
            gate.set()
            whole = first + await running.read()
        assert whole.endswith(b"data: [DONE]\n\n")
        assert whole.count(b"data: ") == 4


async def _turn_works(url: str, tls: Identity) -> bool:
    try:
        return await over_http(url, tls) == 200
    except aiohttp.ClientError:
        return False


Turn = Callable[[], Awaitable[bool]]


async def test_turns_under_load_survive_one_new_certificate_after_the_other(
    authority: Authority, stranger: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CA is replaced as well: first there are both, then certificates of the new one, then it alone."""
    monkeypatch.setattr(identities, "LOOK_S", 0.02)
    ca = both(tmp_path / "ca.pem", authority)
    sides = [authority.issue(role) for role in ("router", "others", "client")]
    router, *rest = (TlsFiles(cert=str(side.cert), key=str(side.key), ca=str(ca)) for side in sides)
    others, client = (Identity("test", files) for files in rest)
    files: dict[str, Any] = {
        "tls_cert": router.cert,
        "tls_key": router.key,
        "tls_ca": router.ca,
        "client_ca": router.ca,
    }
    stopping, done = asyncio.Event(), []
    async with router_stack(tls=others, client_tls=client, max_connections=100, **files) as stack:
        current = CallerContext(client)
        url, grpc_address = f"{stack.url}{CHAT}", f"127.0.0.1:{stack.router.grpc_port}"

        async def http_turn() -> bool:
            body = chat_body("hi", stream=True)
            async with stack.client.post(url, json=body, ssl=current.current()) as got:
                return got.status == 200 and (await got.read()).endswith(b"data: [DONE]\n\n")

        async def grpc_turn() -> bool:
            return (await over_grpc(grpc_address, client)).endswith(b"data: [DONE]\n\n")

        async def load(turn: Turn) -> None:
            while not stopping.is_set():
                done.append(await turn())

        async def more(count: int = 12) -> None:
            least = len(done) + count
            await eventually(lambda: len(done) >= least, 30)

        def replace(by: Authority) -> None:
            for side in sides:
                take(by.issue(f"next-{side.cert.stem}"), side)

        async with asyncio.TaskGroup() as group:
            loads = [group.create_task(load(turn)) for turn in (http_turn, http_turn, http_turn, grpc_turn)]
            await more()
            for change in (
                lambda: both(ca, authority, stranger),
                lambda: replace(authority),
                lambda: replace(stranger),
                lambda: both(ca, stranger),
                lambda: replace(stranger),
            ):
                change()
                for part in (others, client):
                    part.look()
                await more()
            stopping.set()
        assert all(done)
        assert not any(task.cancelled() for task in loads)
        # And none of the old ones is trusted any more.
        with pytest.raises(aiohttp.ClientError):
            await over_http(stack.url, identity(authority.issue("late"), stranger))
