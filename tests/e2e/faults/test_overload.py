"""Ten times more load than capacity: what is too much waits or is refused, and nothing grows."""

import asyncio
import hashlib
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
TENANTS = ("crowd", "few")
_GROWTH_BYTES = 32 * 1024 * 1024


def limited(tmp_path: Path, *limits: str) -> Stack:
    """Returns a stack whose router has a limit, and these flags."""
    options = cluster_options(
        tmp_path,
        seed=5,
        router_flags=["--prefer", "warm", "--max-turns", str(CAPACITY), *limits],
        routers=1,
        registries=1,
        etcd_members=1,
        prefill=1,
        decode=1,
    )
    slow = SimulatedEngine(ttl_s=5, flags=["--decode-step-s", "0.02", "--prefill-tokens-per-s", "20000"])
    return Stack(replace(options, prefill=[slow], decode=[slow]))


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


async def ask(
    http: aiohttp.ClientSession, url: str, number: int, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    body = {
        "model": "backhaul-demo",
        "messages": [{"role": "user", "content": f"client {number} " + "word " * 200}],
        "max_tokens": 16,
        "stream": True,
    }
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, dict(response.headers), await response.read()


async def test_ten_times_the_capacity_is_shed_with_a_clear_error_and_nothing_grows(tmp_path: Path) -> None:
    with limited(tmp_path) as stack:
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


def two_tenants(folder: Path) -> list[str]:
    """Writes the files of two tenants whose keys are their names; returns the router's flags."""
    tables = [f'[tenants.{name}]\nkey_sha256 = ["{hashlib.sha256(name.encode()).hexdigest()}"]' for name in TENANTS]
    (folder / "tenants.toml").write_text("\n".join(tables))
    (folder / "key").write_bytes(b"k" * 32)
    return ["--tenants-file", str(folder / "tenants.toml"), "--cluster-key-file", str(folder / "key")]


async def test_a_crowd_waits_and_a_tenant_with_few_turns_hardly_does(tmp_path: Path) -> None:
    """Ten times the capacity of one tenant, again and again, and a client of another that asks one by one."""
    queue = ["--max-queued", str(2 * CAPACITY), "--queue-timeout-s", "60"]
    with limited(tmp_path, *queue, *two_tenants(tmp_path)) as stack:
        engines = [node.url for node in stack.nodes]
        crowd, few = ({"authorization": f"Bearer {name}"} for name in TENANTS)
        answers: list[tuple[int, dict[str, str], bytes]] = []
        over = asyncio.Event()

        async def crowding(http: aiohttp.ClientSession, number: int) -> None:
            while not over.is_set():
                answers.append(await ask(http, stack.routers[0], number, crowd))
                await asyncio.sleep(0.2 if answers[-1][0] == 429 else 0)

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            assert (await ask(http, stack.routers[0], -1, few))[0] == 200
            asked = [asyncio.create_task(crowding(http, number)) for number in range(CLIENTS // 2)]
            await eventually(lambda: any(status == 429 for status, _, _ in answers), 30)
            for number in range(6):
                status, _, body = await ask(http, stack.routers[0], -2 - number, few)
                assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
                assert await asyncio.to_thread(running_and_waiting, engines[0]) <= CAPACITY + 1
            over.set()
            await asyncio.gather(*asked)
            refused = [
                (headers, json.loads(body)["error"]["code"]) for status, headers, body in answers if status == 429
            ]
            assert {status for status, _, _ in answers} == {200, 429}
            assert {code for _, code in refused} <= {"too_many_turns", "displaced"}
            assert all(1 <= int(headers["Retry-After"]) <= 60 for headers, _ in refused)
            assert sum(status == 200 for status, _, _ in answers) >= 3 * CAPACITY
            await eventually(lambda: sum(map(running_and_waiting, engines)) == 0)
