"""One decode node in a stack: from the last token to the pointer, what claims cost, what sets cost in memory."""

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import aiohttp

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul.registry.v1 import registry_pb2
from backhaul_connector.wire import PARAMS_KEY
from backhaul_local.processes import LocalError
from backhaul_local.stack import Stack
from benchmarks.registry import connector, disk
from benchmarks.registry.callers import RegistryStub, channel_to, registry_stub
from benchmarks.registry.load import Call, Timings
from benchmarks.registry.machine import rss_bytes
from benchmarks.registry.pointers import SCOPE, key_of

_FRESH = itertools.count(1 << 42)
_ANSWER_TOKENS = 4
_LIMIT_S = 10.0
_SETTLE_S = 3.0
_ATTEMPTS = 30

OwnerStub: TypeAlias = "agent_pb2_grpc.BlockSetServiceAsyncStub"


@dataclass(frozen=True, slots=True)
class Memory:
    """What sets cost in two processes, bytes each."""

    set_count: int
    agent_bytes: float
    registry_bytes: float


class Player:
    """Plays turns on the decode engine and looks for what they leave."""

    def __init__(self, session: aiohttp.ClientSession, stack: Stack, registry: RegistryStub) -> None:
        self._session = session
        self._url = f"{stack.node('decode-1').url}/v1/completions"
        self._model = stack.model_name
        self._registry = registry
        self._etcd = stack.etcd_endpoints[0]

    async def fsyncs(self) -> disk.Buckets:
        """Returns what etcd has waited for its disk so far."""
        return await disk.fsyncs(self._session, self._etcd)

    async def turn(self, *, limit_s: float = _LIMIT_S) -> float:
        """Plays a turn; returns how long after its last token it was found. Raises LocalError when it was not."""
        key = key_of(next(_FRESH))
        ended = await self._play(key)
        request = registry_pb2.FindBlockSetsRequest(scope=SCOPE, keys=[key])
        while not (await self._registry.FindBlockSets(request, timeout=_LIMIT_S)).pointers:
            if time.perf_counter() - ended > limit_s:
                raise LocalError(f"a turn cannot be found {limit_s:g} s after its last token")
        return time.perf_counter() - ended

    async def _play(self, key: str) -> float:
        """Returns when the last token came."""
        body = {
            "model": self._model,
            "prompt": [*range(1, 64)],
            "max_tokens": _ANSWER_TOKENS,
            "min_tokens": _ANSWER_TOKENS,
            "stream": True,
            "kv_transfer_params": {PARAMS_KEY: {"scope": SCOPE, "keys": [key]}},
        }
        ended = 0.0
        async with self._session.post(self._url, json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    ended = time.perf_counter()
        if answer.status != 200 or not ended:
            raise LocalError(f"a turn was answered with {answer.status}")
        return ended


@asynccontextmanager
async def player(stack: Stack) -> AsyncIterator[Player]:
    """Yields a player once turns are found. Raises LocalError."""
    async with AsyncExitStack() as resources:
        registry = await registry_stub(stack.registries[0], resources)
        session = await resources.enter_async_context(aiohttp.ClientSession(trust_env=False))
        played = Player(session, stack, registry)
        for _ in range(_ATTEMPTS):
            # The engine's connector comes within two seconds of its agent's start.
            with contextlib.suppress(LocalError):
                await played.turn(limit_s=1.0)
                break
        yield played


async def findable(played: Player, *, turns_per_s: float, seconds: float, timings: Timings) -> None:
    """Plays turns at a steady rate; notes how long after its last token each can be found. Raises LocalError."""
    began = time.perf_counter()

    async def one() -> None:
        timings.latencies_s.append(await played.turn())

    async with asyncio.TaskGroup() as group:
        for number in range(round(seconds * turns_per_s)):
            await asyncio.sleep(max(0.0, began + number / turns_per_s - time.perf_counter()))
            group.create_task(one())


@asynccontextmanager
async def holding(stack: Stack, set_count: int) -> AsyncIterator[Memory]:
    """Has the agent hold so many sets, all of them published, until left. Raises LocalError."""
    pids = [stack.process(name).pid for name in (stack.node("decode-1").agent, "registry-1")]
    before = [rss_bytes(pid) for pid in pids]
    async with AsyncExitStack() as resources:
        registry = await registry_stub(stack.registries[0], resources)
        await resources.enter_async_context(connector.connected(stack.node("decode-1").socket, set_count))
        await _await_all(registry, set_count)
        await asyncio.sleep(_SETTLE_S)
        more = [rss_bytes(pid) - of for pid, of in zip(pids, before, strict=True)]
        yield Memory(set_count, *(size / set_count for size in more))


async def _await_all(registry: RegistryStub, set_count: int) -> None:
    until = time.monotonic() + 10 * _LIMIT_S
    request = registry_pb2.FindBlockSetsRequest(scope=SCOPE, keys=[connector.key_to(set_count - 1)])
    while not (await registry.FindBlockSets(request, timeout=_LIMIT_S)).pointers:
        if time.monotonic() > until:
            raise LocalError("the sets of a connector cannot be found")
        await asyncio.sleep(0.2)


@asynccontextmanager
async def claimers(address: str, count: int, set_count: int) -> AsyncIterator[Sequence[Call]]:
    """Yields callers that claim a set, each another one, and give it back."""
    async with AsyncExitStack() as resources:
        stub: OwnerStub = agent_pb2_grpc.BlockSetServiceStub(await channel_to(address, resources))
        yield [partial(_claim, stub, itertools.cycle(range(index, set_count, count))) for index in range(count)]


async def _claim(stub: OwnerStub, numbers: "itertools.cycle[int]") -> None:
    request_id = uuid.uuid4().hex
    request = agent_pb2.ClaimBlockSetRequest(
        request_id=request_id,
        set_id=connector.set_of(next(numbers)),
        engine_id=connector.ENGINE,
        scope=SCOPE,
        weights_digest=connector.WEIGHTS,
    )
    await stub.ClaimBlockSet(request, timeout=_LIMIT_S)
    await stub.ReturnBlockSet(agent_pb2.ReturnBlockSetRequest(request_id=request_id), timeout=_LIMIT_S)
