"""Retention on a running stack of simulated engines: kept beyond the engine's own time, and never in anybody's way.

Bounds are for a busy machine of two cores; engines keep what nobody frees far longer than they allow.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from backhaul_connector.wire import PARAMS_KEY
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.stack.chat import Chat, answered, opening
from tests.fakes.eventually import eventually
from tests.soak.cluster import cluster_options
from tests.soak.ledgers import Ledgers

pytestmark = pytest.mark.timeout(180)

BLOCK_SIZE = 16
BLOCKS = 1_000
SHARE, MARK = 0.5, 0.9
RESERVE = BLOCKS - int(BLOCKS * MARK)
TTL_S = 10.0
"""Of the engine that renewals are tried on."""
LONG_TTL_S = 600.0
FREED_S = 10.0
"""A release takes some 0.2 s, and is promised within two."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two decode nodes: one keeps blocks for a short time by itself, the other one is small."""
    options = cluster_options(
        tmp_path_factory.mktemp("s"),
        seed=5,
        router_flags=["--prefer", "warm"],
        routers=1,
        registries=1,
        etcd_members=1,
        prefill=1,
        decode=2,
        max_retention_s=LONG_TTL_S,
    )
    sizes = ["--block-size", str(BLOCK_SIZE)]
    short = SimulatedEngine(ttl_s=TTL_S, lease_s=18, flags=[*sizes, "--recompute-threshold", "1"])
    small = SimulatedEngine(
        ttl_s=LONG_TTL_S,
        flags=[*sizes, "--block-count", str(BLOCKS), "--decode-step-s", "0.04"],
        agent_flags=["--retained-share", str(SHARE), "--pressure-mark", str(MARK)],
    )
    with Stack(replace(options, decode=[short, small])) as stack:
        yield stack


@pytest.fixture
async def small(stack: Stack) -> AsyncIterator["Small"]:
    """The small engine, with as much retained as may be."""
    async with httpx2.AsyncClient(base_url=stack.node("decode-2").url, timeout=120, trust_env=False) as http:
        small = Small(stack, http)
        await small.fill()
        yield small


class Small:
    """A decode engine, asked directly."""

    def __init__(self, stack: Stack, http: httpx2.AsyncClient) -> None:
        self._stack = stack
        self._http = http
        self.token = 0

    def prompt(self, block_count: int) -> list[int]:
        """Returns a prompt that fills blocks of its own."""
        self.token += 1
        return [(self.token * 7_919 + index) % 40_000 for index in range(block_count * BLOCK_SIZE - 2)]

    async def complete(self, prompt: list[int], max_tokens: int, **body: Any) -> list[int]:
        """Runs a request; returns the tokens of its answer."""
        request = {"model": self._stack.model_name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        answer = await self._http.post("/v1/completions", json={**request, "return_token_ids": True, **body})
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    async def finish_turn(self, prompt: list[int], key: str, *continues: str) -> list[int]:
        """Runs a turn that is labelled as a router's are; returns all its tokens."""
        label = {"scope": "scope", "keys": [key], "continues": list(continues)}
        return [*prompt, *await self.complete(prompt, 2, kv_transfer_params={PARAMS_KEY: label})]

    async def fill(self) -> None:
        """Has more finished turns retained than may be, and waits until the rest is freed."""

        async def retained() -> bool:
            for number in range(10):
                await self.finish_turn(self.prompt(60), f"filling-{number}")
            return self.retained()["blocks"] > BLOCKS * SHARE / 2

        # Until the agent knows the engine's weights nothing is retained.
        await eventually(retained, 60.0)
        await eventually(lambda: self.retained()["blocks"] <= BLOCKS * SHARE, FREED_S)

    def ledger(self) -> dict[str, Any]:
        (rank,) = Ledgers().collect([self._stack.node("decode-2").url])
        return rank

    def retained(self) -> dict[str, int]:
        """Returns what finished turns hold: sets and blocks."""
        kept: dict[str, int] = self.ledger()["retained"]["claimed"]
        return kept

    async def has_reserve(self) -> bool:
        """Tells whether as much is free as must be for requests that come."""
        return await self.usage() <= MARK

    async def usage(self) -> float:
        """Returns the share of blocks in use."""
        return await self.metric("vllm:kv_cache_usage_perc")

    async def metric(self, name: str) -> float:
        """Returns one of vLLM's metrics."""
        text = (await self._http.get("/metrics")).text
        line = next(line for line in text.splitlines() if line.startswith(name))
        return float(line.rsplit(" ", 1)[1])


async def test_a_conversation_is_kept_beyond_the_engines_own_time(stack: Stack) -> None:
    chat = Chat(stack.routers[0])
    messages = opening(300)
    try:
        for _ in range(40):
            # Until one lands on the engine with the short time, and its second turn is warm.
            reply = await asyncio.to_thread(chat.send, messages)
            (rank,) = Ledgers().collect([stack.node("decode-1").url])
            if rank["retained"]["claimed"]["sets"]:
                break
            messages = opening(300)
        await asyncio.sleep(TTL_S + 6)

        again = await asyncio.to_thread(chat.send, answered(messages, reply.text))

        assert (again.route, again.miss) == ("warm", "")
        assert again.text == await asyncio.to_thread(chat.cold, answered(messages, reply.text))
    finally:
        chat.http.close()


async def test_requests_that_come_one_by_one_never_wait_for_retained_blocks(small: Small) -> None:
    before, computed = small.ledger(), await small.metric("vllm:prompt_tokens_total")
    running: list[asyncio.Task[list[int]]] = []

    async def all_run() -> bool:
        # Counted with its first token: then it has its blocks.
        tokens = len(running) * len(small.prompt(RESERVE // 2))
        return await small.metric("vllm:prompt_tokens_total") >= computed + tokens

    for _ in range(12):
        # Together they need most of the pool; each comes when the reserve is there, as it must soon be.
        await eventually(small.has_reserve, 30.0)
        running.append(asyncio.create_task(small.complete(small.prompt(RESERVE // 2), 200)))
        await eventually(all_run, 30.0)
    pushed_out = small.retained()["blocks"]
    await asyncio.gather(*running)

    after = small.ledger()
    assert pushed_out < before["retained"]["claimed"]["blocks"]
    assert after["waits_for_retained"] == before["waits_for_retained"]
    assert after["preemptions"] == before["preemptions"]


async def test_a_burst_beyond_the_reserve_gets_its_blocks_at_once(small: Small) -> None:
    burst = [asyncio.create_task(small.complete(small.prompt(80), 40)) for _ in range(10)]
    await asyncio.wait_for(asyncio.gather(*burst), 60.0)

    assert small.retained()["blocks"] <= BLOCKS * SHARE


async def test_what_a_newer_turn_covers_is_freed(small: Small) -> None:
    tokens = await small.finish_turn(small.prompt(40), "covered")
    await eventually(lambda: small.retained()["sets"] > 0, FREED_S)
    before = small.retained()["sets"]
    assert before

    await small.finish_turn([*tokens, *small.prompt(2)], "newer", "covered")

    await eventually(lambda: small.retained()["sets"] == before, FREED_S)


async def test_memory_that_is_too_much_is_free_again_soon(small: Small) -> None:
    for number in range(20):
        await small.finish_turn(small.prompt(50), f"many-{number}")

    async def fell() -> bool:
        return await small.usage() <= SHARE + 0.01

    await eventually(fell, FREED_S)
    assert small.retained()["blocks"] > BLOCKS * SHARE / 2, "no more is freed than must be"
