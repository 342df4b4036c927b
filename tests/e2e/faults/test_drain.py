"""Nodes of simulated engines that are drained while turns run: no client notices, and nothing is left behind."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf.duration_pb2 import Duration

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.timeout(180)

WORDS = " ".join(f"word{index}" for index in range(120))
STEP_S = 0.02
DECODES = ("decode-1", "decode-2")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    decode = SimulatedEngine(flags=["--decode-step-s", str(STEP_S)])
    options = StackOptions(
        state=tmp_path_factory.mktemp("s"),
        prefill=[SimulatedEngine()],
        decode=[decode] * len(DECODES),
        agent_flags=["--drain-s", "8"],
        router_flags=["--prefer", "warm", "--lookup-budget-s", "1"],
    )
    with Stack(options) as stack:
        yield stack


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=60, trust_env=False) as client:
        yield client


class Stream:
    """A turn that is streamed while the test goes on."""

    def __init__(self, stack: Stack, http: httpx2.AsyncClient, tokens: int) -> None:
        self._tokens = tokens
        self._task = asyncio.create_task(chat(stack, http, f"stream of {tokens}", max_tokens=tokens, stream=True))

    @property
    def running(self) -> bool:
        return not self._task.done()

    async def ends_whole(self) -> None:
        """Waits for its end."""
        answer = await self._task
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        assert f'"completion_tokens":{self._tokens}' in answer.text.replace(" ", "")


async def chat(stack: Stack, http: httpx2.AsyncClient, text: str, **fields: Any) -> httpx2.Response:
    """Runs one turn through the router."""
    body = {"model": stack.model_name, "messages": [{"role": "user", "content": f"{text} {WORDS}"}], **fields}
    body = {"max_tokens": 4, "ignore_eos": True, **body}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    return await http.post(f"{stack.routers[0]}/v1/chat/completions", json=body)


async def running_on(stack: Stack, http: httpx2.AsyncClient, name: str) -> int:
    """Returns how many requests an engine has."""
    shown = (await http.get(f"{stack.node(name).url}/metrics")).text
    counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} ([0-9.]+)$", shown, re.MULTILINE)
    return round(sum(map(float, counts)))


async def busy(stack: Stack, http: httpx2.AsyncClient) -> str:
    """Waits until a decode engine has a request; returns its name."""
    found: list[str] = []

    async def some() -> bool:
        found.extend([name for name in DECODES if await running_on(stack, http, name)])
        return bool(found)

    await eventually(some, 20)
    return found[0]


async def drain(stack: Stack, name: str, timeout_s: int) -> agent_pb2.DrainResponse:
    """Asks a node's agent for a drain, as an operator does."""
    async with grpc.aio.insecure_channel(stack.node(name).agent_address) as channel:
        stub = agent_pb2_grpc.BlockSetServiceStub(channel)
        request = agent_pb2.DrainRequest(timeout=Duration(seconds=timeout_s))
        response: agent_pb2.DrainResponse = await stub.Drain(request, timeout=10)
        return response


async def has_left(stack: Stack, name: str) -> bool:
    return (await drain(stack, name, 600)).phase == agent_pb2.DRAIN_PHASE_LEFT


async def listed(stack: Stack) -> dict[str, registry_pb2.Node]:
    """Returns the nodes in the directory."""
    async with grpc.aio.insecure_channel(stack.registries[0]) as channel:
        answer = await registry_pb2_grpc.NodeServiceStub(channel).ListNodes(registry_pb2.ListNodesRequest(), timeout=10)
    return {node.node_id: node for node in answer.nodes}


async def says_when_it_leaves(stack: Stack, name: str) -> bool:
    return "leaves in" in (await listed(stack))[name].state_reason


async def finished_on(stack: Stack, http: httpx2.AsyncClient, name: str) -> int:
    """Returns how many requests an engine has finished."""
    shown = (await http.get(f"{stack.node(name).url}/metrics")).text
    return round(sum(map(float, re.findall(r"^vllm:request_success_total\{.*\} ([0-9.]+)$", shown, re.MULTILINE))))


async def retained_on(stack: Stack, http: httpx2.AsyncClient, name: str) -> int:
    """Returns of how many finished turns an engine keeps the blocks."""
    (rank,) = (await http.get(f"{stack.node(name).url}/simulator/ledger")).json()["ranks"]
    return int(rank["retained"]["claimed"]["sets"])


async def back(stack: Stack, name: str) -> None:
    """Restarts a node's agent; returns when the node takes turns again."""
    await asyncio.to_thread(stack.restart, stack.node(name).agent)

    async def ready() -> bool:
        node = (await listed(stack)).get(name)
        return node is not None and node.state == registry_pb2.NODE_STATE_READY

    await eventually(ready, 30)


async def test_a_drained_node_ends_its_stream_gets_no_turn_releases_and_leaves(
    stack: Stack, http: httpx2.AsyncClient
) -> None:
    for number in range(12):
        assert (await chat(stack, http, f"before {number}")).status_code == 200
    stream = Stream(stack, http, 300)
    name = await busy(stack, http)
    assert await retained_on(stack, http, name) > 0
    before = await finished_on(stack, http, name)

    assert (await drain(stack, name, 300)).phase == agent_pb2.DRAIN_PHASE_DRAINING
    await eventually(lambda: says_when_it_leaves(stack, name), 10)
    for number in range(6):
        assert (await chat(stack, http, f"other {number}")).status_code == 200
    assert stream.running
    assert not await has_left(stack, name)

    await stream.ends_whole()
    await eventually(lambda: has_left(stack, name), 60)
    assert name not in await listed(stack)
    assert (await drain(stack, name, 300)).remaining_count == 0
    assert await retained_on(stack, http, name) == 0

    for number in range(6):
        assert (await chat(stack, http, f"afterwards {number}")).status_code == 200
    assert await finished_on(stack, http, name) == before + 1
    await asyncio.to_thread(stack.stop, stack.node(name).agent)
    await back(stack, name)


async def test_a_stream_that_outlasts_the_deadline_is_left_behind_and_goes_on(
    stack: Stack, http: httpx2.AsyncClient
) -> None:
    stream = Stream(stack, http, 700)
    name = await busy(stack, http)
    await drain(stack, name, 2)
    await eventually(lambda: has_left(stack, name), 20)
    assert stream.running
    await stream.ends_whole()
    await asyncio.to_thread(stack.stop, stack.node(name).agent)
    await back(stack, name)


async def test_no_client_notices_that_all_agents_of_a_role_end(stack: Stack, http: httpx2.AsyncClient) -> None:
    stream = Stream(stack, http, 300)
    await busy(stack, http)
    ending = [asyncio.create_task(asyncio.to_thread(stack.stop, stack.node(name).agent)) for name in DECODES]
    count = 0
    while not all(task.done() for task in ending) or count < 6:
        assert (await chat(stack, http, f"meanwhile {count}")).status_code == 200
        count += 1
    await stream.ends_whole()
    assert not set(DECODES) & set(await listed(stack))
    assert (await chat(stack, http, "orphans serve")).status_code == 200
    for name in DECODES:
        await back(stack, name)
