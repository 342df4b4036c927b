"""A router that is asked to stop lets its clients go elsewhere first."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backhaul.router.v1 import router_pb2_grpc
from backhaul_common.grpc_client import open_channel
from backhaul_router.app import Running
from tests.fakes.engine import hang
from tests.fakes.etcd_process import free_port
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_for, router_stack
from tests.integration.test_router_shedding import grpc_request


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


@contextlib.asynccontextmanager
async def stopping(stack: RouterStack, **config: float) -> AsyncIterator[tuple[Running, Callable[[], None]]]:
    """A second router, and what has it stop; leaving waits for its end."""
    go, known = asyncio.Event(), asyncio.Event()
    routers: list[Running] = []

    async def run() -> None:
        async with router_for((stack.directory.address,), **config) as router:
            await eventually(lambda: len(router.table) == 2)
            routers.append(router)
            known.set()
            await go.wait()

    task = asyncio.create_task(run())
    await known.wait()
    try:
        yield routers[0], go.set
    finally:
        go.set()
        await task


async def test_while_it_waits_it_is_not_ready_and_still_takes_turns(stack: RouterStack) -> None:
    async with stopping(stack, lame_duck_s=3.0, grace_s=5.0) as (router, stop):
        url = f"http://127.0.0.1:{router.http_port}"
        stop()
        await asyncio.sleep(0)
        async with stack.client.get(f"{url}/ready") as response:
            assert (response.status, (await response.json())["reason"]) == (503, "stopping")
            assert response.headers["connection"] == "close"
        async with stack.client.get(f"{url}/health") as response:
            assert response.status == 200
        for stream in (False, True):
            async with stack.client.post(f"{url}{CHAT}", json=chat_body("hi", stream=stream)) as response:
                assert (response.status, response.headers["connection"]) == (200, "close")
        async with open_channel(f"127.0.0.1:{router.grpc_port}") as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
            call = router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(grpc_request(), timeout=5)
            assert len([step async for step in call]) == 2


async def test_then_it_takes_no_connections_and_finishes_what_runs(stack: RouterStack) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    async with stopping(stack, lame_duck_s=0.3, grace_s=10.0) as (router, stop):
        url = f"http://127.0.0.1:{router.http_port}"
        async with open_channel(f"127.0.0.1:{router.grpc_port}") as channel:
            call = router_pb2_grpc.InferenceServiceStub(channel).ChatCompletions(grpc_request(stream=True), timeout=10)
            await call.read()
            response = await stack.client.post(f"{url}{CHAT}", json=chat_body("hi", stream=True))
            stop()
            await eventually(lambda: _refuses(router.http_port))
            stack.decode.chunk_gate.set()
            assert (await response.read()).endswith(b"[DONE]\n\n")
            assert b"".join([step.chunk async for step in call]).endswith(b"[DONE]\n\n")


async def test_a_connection_that_is_idle_when_it_stops_is_closed_at_once(stack: RouterStack) -> None:
    """Left open, it would take a request and never answer."""
    stack.decode.then(hang())
    async with stopping(stack, lame_duck_s=0.5, grace_s=30.0) as (router, stop):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        running = asyncio.create_task(
            stack.client.post(f"http://127.0.0.1:{router.http_port}{CHAT}", json=chat_body("hi"))
        )
        await eventually(lambda: bool(stack.decode.legs))
        stop()
        assert await asyncio.wait_for(reader.read(), 10) == b""
        assert not running.done()
        writer.close()
        await writer.wait_closed()
        running.cancel()
        await asyncio.wait([running])


async def test_a_client_that_has_just_connected_when_the_port_closes_is_answered(stack: RouterStack) -> None:
    async with stopping(stack, lame_duck_s=0.1, grace_s=5.0) as (router, stop):
        with socket.create_connection(("127.0.0.1", router.http_port)) as client:
            stop()
            await eventually(lambda: _refuses(router.http_port))
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await asyncio.to_thread(client.recv, 15) == b"HTTP/1.1 200 OK"


async def test_watches_end_and_the_port_is_free_when_it_is_gone(stack: RouterStack) -> None:
    async with (
        stopping(stack, lame_duck_s=0.1, grace_s=5.0) as (router, stop),
        open_channel(f"127.0.0.1:{router.grpc_port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stop()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
    async with router_for((stack.directory.address,), listen_http=f"127.0.0.1:{router.http_port}"):
        pass


# The process


@contextlib.contextmanager
def process(stack: RouterStack, *flags: str) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """A router of its own; yields its HTTP port and itself."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("backhaul-router")), "--registry", stack.directory.address]
    command += ["--listen-http", f"127.0.0.1:{port}", "--listen-grpc", "127.0.0.1:0", *flags]
    router = subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True)
    try:
        yield port, router
    finally:
        router.kill()
        router.wait()


async def test_steady_load_through_a_sigterm_loses_no_request(stack: RouterStack) -> None:
    """As behind a gateway that looks at `/ready` every 0.1 s."""
    with process(stack, "--lame-duck-s", "2", "--lookup-budget-s", "1") as (port, router):
        url = f"http://127.0.0.1:{port}"
        load = _Load(url, stack)
        await eventually(lambda: load.ready(), 20)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(load.watch())
            senders = [tasks.create_task(load.send(stream=bool(index % 2))) for index in range(8)]
            await eventually(lambda: load.answered > 50, 20)
            router.send_signal(signal.SIGTERM)
            await eventually(lambda: not load.up)
            for sender in senders:
                await sender
            watching.cancel()
        assert await asyncio.to_thread(router.wait, 10) == 0
    assert load.failures == []


async def test_clients_that_ask_until_the_port_is_closed_lose_no_request(stack: RouterStack) -> None:
    with process(stack, "--lame-duck-s", "0.3", "--lookup-budget-s", "1") as (port, router):
        load = _Load(f"http://127.0.0.1:{port}", stack)
        await eventually(lambda: load.ready(), 20)
        async with asyncio.TaskGroup() as tasks:
            for index in range(24):
                tasks.create_task(load.send_until_refused(stream=bool(index % 2)))
            await eventually(lambda: load.answered > 50, 20)
            router.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(router.wait, 10) == 0
    assert load.failures == []


async def test_a_second_sigterm_ends_it_at_once(stack: RouterStack) -> None:
    with process(stack, "--lame-duck-s", "30") as (port, router):
        load = _Load(f"http://127.0.0.1:{port}", stack)
        await eventually(lambda: load.ready(), 20)
        router.send_signal(signal.SIGTERM)
        await eventually(lambda: load.leaving())
        began = time.monotonic()
        router.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(router.wait, 10) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 5


class _Load:
    """Clients that send to a router while it says that it is ready."""

    def __init__(self, url: str, stack: RouterStack) -> None:
        self.up = True
        self.answered = 0
        self.failures: list[str] = []
        self._url = url
        self._client = stack.client

    async def ready(self) -> bool:
        try:
            async with self._client.get(f"{self._url}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def leaving(self) -> bool:
        return not await self.ready()

    async def watch(self) -> None:
        while self.up:
            self.up = await self.ready()
            await asyncio.sleep(0.1)

    async def send(self, *, stream: bool) -> None:
        while self.up and await self._one(stream):
            pass

    async def send_until_refused(self, *, stream: bool) -> None:
        with contextlib.suppress(aiohttp.ClientConnectorError):
            while await self._one(stream):
                pass

    async def _one(self, stream: bool) -> bool:
        """Sends a request; returns whether to go on. Raises ClientConnectorError when the port is closed."""
        try:
            async with self._client.post(f"{self._url}{CHAT}", json=chat_body("hi", stream=stream)) as response:
                body = await response.read()
        except aiohttp.ClientConnectorError:
            raise
        except aiohttp.ClientError as error:
            self.failures.append(repr(error))
            return False
        if response.status != 200 or (stream and not body.endswith(b"[DONE]\n\n")):
            self.failures.append(f"{response.status} {body[:200]!r}")
        self.answered += 1
        return True


def _refuses(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
