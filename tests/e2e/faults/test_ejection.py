"""A decode node that fails one request in fifty, under a steady load: it is left alone until it is well again."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.timeout(180)

RATE = 100
"""Turns that begin per second, where the machine can."""
MOST = 32
"""Turns at once: on a slow machine fewer begin."""
FAILING, DECODES = "decode-1", ("decode-1", "decode-2", "decode-3")
EJECTION_S, SLOW_START_S = 4, 4
ROUTING = f"""
[breaker]
# A slow machine serves few turns per second: what counts, counts for longer, and whoever is away is so for longer.
window_s = 60
ejection_s = {EJECTION_S}
slow_start_s = {SLOW_START_S}

[[decode.scorers]]
type = "least-running"
"""
SOME = 40
"""Turns of which the shares are looked at."""
_SERVED = re.compile(r"^vllm:request_success_total\{.*\} ([0-9.]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state: Path = tmp_path_factory.mktemp("s")
    (state / "routing.toml").write_text(ROUTING)
    decode = SimulatedEngine(flags=["--decode-step-s", "0.005"])
    options = StackOptions(
        state=state,
        prefill=[SimulatedEngine()],
        decode=[decode] * len(DECODES),
        router_flags=["--routing-file", str(state / "routing.toml")],
    )
    with Stack(options) as stack:
        yield stack


class Load:
    """Short turns, each a conversation of its own, and what their clients got."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._http = http
        self.statuses: Counter[int] = Counter()

    async def run(self) -> None:
        """Begins turns at a steady rate until it is cancelled; then waits for those under way."""
        begun = time.monotonic()
        running: set[asyncio.Task[None]] = set()
        number = 0
        try:
            while True:
                if number < RATE * (time.monotonic() - begun) and len(running) < MOST:
                    task = asyncio.create_task(self._turn(number))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    number += 1
                else:
                    await asyncio.sleep(0.5 / RATE)
        finally:
            await asyncio.gather(*running)

    async def _turn(self, number: int) -> None:
        body = {
            "model": self._stack.model_name,
            "messages": [{"role": "user", "content": f"turn {number}"}],
            "max_tokens": 3,
            "ignore_eos": True,
        }
        async with self._http.post(f"{self._stack.routers[0]}/v1/chat/completions", json=body) as answer:
            await answer.read()
            self.statuses[answer.status] += 1


class Engines:
    """What the decode engines say of themselves."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self._urls = {name: stack.node(name).url for name in DECODES}
        self._http = http

    async def fail_some(self, share: float) -> None:
        """Has the failing node answer a share of its turns with a 500."""
        fault = {"fault": "bare_500", "share": share, "times": 1_000_000, "path": "/v1/chat/completions"}
        async with self._http.post(f"{self._urls[FAILING]}/simulator/faults", json={"next": [fault]}) as answer:
            assert answer.status == 200

    async def fail_no_more(self) -> None:
        """Has it answer all again."""
        async with self._http.delete(f"{self._urls[FAILING]}/simulator/faults") as answer:
            assert answer.status == 200

    async def faults(self) -> int:
        """Returns how many turns the failing node has failed."""
        async with self._http.get(f"{self._urls[FAILING]}/simulator/faults") as answer:
            return 1_000_000 - int((await answer.json())["next"][0]["times"])

    async def next_share(self) -> float:
        """Returns the failing node's share of the turns that are served from now on."""
        before = await self._served()

        async def some() -> bool:
            return sum((await self._served()).values()) >= sum(before.values()) + SOME

        await eventually(some, 60)
        served = await self._served()
        served.subtract(before)
        return served[FAILING] / served.total()

    async def _served(self) -> Counter[str]:
        return Counter({name: await self._served_by(url) for name, url in self._urls.items()})

    async def _served_by(self, url: str) -> int:
        async with self._http.get(f"{url}/metrics") as answer:
            return round(sum(map(float, _SERVED.findall(await answer.text()))))


@asynccontextmanager
async def loaded(stack: Stack) -> AsyncIterator[tuple[Load, Engines]]:
    """Serves turns until it is left."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        load = Load(stack, http)
        running = asyncio.create_task(load.run())
        try:
            yield load, Engines(stack, http)
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_a_node_that_fails_some_of_its_requests_gets_little_until_it_is_well_again(stack: Stack) -> None:
    async with loaded(stack) as (load, engines):

        async def has_its_share() -> bool:
            return 0.2 <= await engines.next_share() <= 0.5

        async def third_fault() -> bool:
            return await engines.faults() >= 3

        # Nodes that joined late start slowly.
        await eventually(has_its_share, 60)
        await engines.fail_some(0.02)
        await eventually(third_fault, 90)
        # What is under way there ends.
        await asyncio.sleep(1)
        assert await engines.next_share() < 0.1
        await asyncio.sleep(SLOW_START_S)
        await engines.fail_no_more()
        await eventually(has_its_share, 60)
    assert load.statuses.keys() == {200}, "each of its faults is repeated elsewhere"
