"""Ten times more load than capacity: what is too much is refused at once, and nothing grows."""

import asyncio
import json
import resource
import urllib.request
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.fakes.eventually import eventually
from tests.soak.cluster import cluster_options

pytestmark = pytest.mark.timeout(180)

CAPACITY = 24
CLIENTS = 10 * CAPACITY
ROUNDS = 8
_GROWTH_BYTES = 32 * 1024 * 1024


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    options = cluster_options(tmp_path, seed=5, routers=1, registries=1, etcd_members=1, prefill=1, decode=1)
    slow = SimulatedEngine(ttl_s=5, flags=["--decode-step-s", "0.02", "--prefill-tokens-per-s", "20000"])
    flags = [*options.router_flags, "--max-turns", str(CAPACITY)]
    return Stack(replace(options, prefill=[slow], decode=[slow], router_flags=flags))


def resident(pid: int) -> int:
    """Returns the bytes of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def running_and_waiting(url: str) -> int:
    """Returns how many requests an engine has."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(names))


async def ask(http: aiohttp.ClientSession, url: str, number: int) -> tuple[int, dict[str, str], bytes]:
    body = {
        "model": "backhaul-demo",
        "messages": [{"role": "user", "content": f"client {number} " + "word " * 200}],
        "max_tokens": 16,
        "stream": True,
    }
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        return response.status, dict(response.headers), await response.read()


async def test_ten_times_the_capacity_is_shed_with_a_clear_error_and_nothing_grows(stack: Stack) -> None:
    with stack:
        router = stack.process("router-1").pid
        engines = [node.url for node in stack.nodes]
        most = 0
        statuses: list[int] = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            assert (await ask(http, stack.routers[0], -1))[0] == 200
            first_round = 0
            for round_number in range(ROUNDS):
                asked = [asyncio.ensure_future(ask(http, stack.routers[0], number)) for number in range(CLIENTS)]
                while not all(task.done() for task in asked):
                    busy = [await asyncio.to_thread(running_and_waiting, url) for url in engines]
                    most = max(most, *busy)
                    await asyncio.sleep(0.05)
                for status, headers, body in [task.result() for task in asked]:
                    statuses.append(status)
                    if status == 200:
                        assert body.endswith(b"data: [DONE]\n\n")
                    else:
                        assert status == 429
                        assert int(headers["Retry-After"]) >= 1
                        assert "limit; try again" in json.loads(body)["error"]["message"]
                if round_number == 0:
                    first_round = resident(router)
            assert resident(router) - first_round < _GROWTH_BYTES
            assert statuses.count(200) >= ROUNDS * CAPACITY // 2
            assert statuses.count(429) >= ROUNDS * CAPACITY
            assert most <= CAPACITY + 1
            await eventually(lambda: sum(map(running_and_waiting, engines)) == 0)
            assert (await ask(http, stack.routers[0], -2))[0] == 200
