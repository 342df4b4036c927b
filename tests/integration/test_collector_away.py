"""A router whose collector of traces is away, or silent: neither turns nor its end wait for it."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest

from tests.fakes.etcd_process import free_port
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack

EXPORT_S = 10.0
"""How long one export waits for a collector that is silent; whoever waited for it would take as long."""
TURNS = 40
"""About six spans each: more than are queued."""


@pytest.fixture(params=["silent", "away"])
def collector(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yields a port that takes connections and answers nothing, or one where nobody listens."""
    if request.param == "away":
        yield free_port()
        return
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        yield silent.getsockname()[1]


@asynccontextmanager
async def traced_router(stack: RouterStack, collector: int) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Runs a router that exports each span at once; yields its URL and process."""
    port = free_port()
    listening = ("--listen-http", f"127.0.0.1:{port}", "--listen-grpc", f"127.0.0.1:{free_port()}")
    waiting = ("--lame-duck-s", "0", "--grace-s", "0", "--lookup-budget-s", "1")
    tracing = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector}",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_BSP_MAX_QUEUE_SIZE": "32",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16",
    }
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backhaul_router", "--registry", stack.directory.address, *listening, *waiting),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **tracing},
    )
    try:
        yield f"http://127.0.0.1:{port}", running
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


async def turn_s(stack: RouterStack, url: str) -> float:
    """Runs a turn; returns how long it took, seconds."""
    began = time.monotonic()
    async with stack.client.post(f"{url}{CHAT}", json=chat_body("hi", stream=True)) as response:
        assert response.status == 200
        assert (await response.read()).endswith(b"[DONE]\n\n")
    return time.monotonic() - began


async def test_no_turn_waits_for_a_collector_and_the_router_ends_soon(collector: int) -> None:
    async with router_stack() as stack, traced_router(stack, collector) as (url, running):

        async def ready() -> bool:
            try:
                async with stack.client.get(f"{url}/ready") as response:
                    return response.status == 200
            except OSError:
                return False

        await eventually(ready, 30)
        longest = max([await turn_s(stack, url) for _ in range(TURNS)])
        running.send_signal(signal.SIGTERM)
        told = time.monotonic()
        async with asyncio.timeout(2 * EXPORT_S):
            assert await running.wait() == 0
    # A turn takes milliseconds and the end two seconds on an idle machine; an export takes as long as it waits.
    assert longest < EXPORT_S / 2
    assert time.monotonic() - told < EXPORT_S * 0.8
