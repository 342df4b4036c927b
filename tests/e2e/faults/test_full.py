"""Connector and agent are full: clients get their texts, merely cold, and soon everything is reused again.

Bounds are for a busy machine of two cores.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_common.errors import BackhaulError, ResourceExhaustedError
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_common.grpc_server import MAX_CALLS
from backhaul_connector.wire import PARAMS_KEY
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.stack.chat import Chat, Messages, answered, opening
from tests.fakes.eventually import eventually
from tests.soak.cluster import cluster_options
from tests.soak.ledgers import Ledgers

pytestmark = pytest.mark.timeout(180)

BLOCK_SIZE = 16
BLOCKS = 4_000
SHARE = 0.25
TTL_S = 30.0
MAX_QUEUED = 5
WARM_S = 30.0
"""Until turns are warm again."""
RELEASED_S = 10.0
"""Until what is too much is released: far from `TTL_S`."""
FILLED_S = 60.0
REPORT_TOKENS = 12_800
"""Of a turn whose report has some 9 kB."""
FILLING_TURNS = 70
"""So many reports are more than Linux' 208 KiB of a socket, the connector's 256 KiB before it and its queue take."""
LONG_TURN_WORDS = 1_500
LONG_TURNS = 24
"""Turns of some 100 blocks each: twice what finished turns may hold."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One of everything; finished turns may hold a quarter of the decode engine's blocks."""
    options = cluster_options(
        tmp_path_factory.mktemp("s"),
        seed=3,
        router_flags=["--prefer", "warm"],
        routers=1,
        registries=1,
        etcd_members=1,
        prefill=1,
        decode=1,
        max_retention_s=TTL_S,
    )
    sizes = {"block-size": BLOCK_SIZE, "block-count": BLOCKS, "recompute-threshold": 1, "max-queued": MAX_QUEUED}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    share = ["--retained-share", str(SHARE)]
    decode = [SimulatedEngine(ttl_s=TTL_S, flags=flags)]
    with Stack(replace(options, decode=decode, agent_flags=[*options.agent_flags, *share])) as stack:
        yield stack


@pytest.fixture
async def chat(stack: Stack) -> AsyncIterator[Chat]:
    """A client for whom turns are warm; afterwards no set was read twice and no wrong content used."""
    chat = Chat(stack.routers[0])
    await eventually_warm(chat)
    yield chat
    chat.http.close()
    ledgers = Ledgers()
    ledgers.collect(node.url for node in stack.nodes)
    assert ledgers.forbidden() == {}


async def finished_turn(chat: Chat, words: int = 300) -> Messages:
    """Runs the first turn of a conversation, which must be right; returns the messages of its next one."""
    messages = opening(words)
    reply = await asyncio.to_thread(chat.send, messages)
    assert (reply.status, reply.text) == (200, await asyncio.to_thread(chat.cold, messages)), reply.raw
    return answered(messages, reply.text)


async def route_of(chat: Chat, messages: Messages) -> tuple[str, str]:
    """Runs a turn, which must be right; returns its route and why it read nothing."""
    reply = await asyncio.to_thread(chat.send, messages)
    assert (reply.status, reply.text) == (200, await asyncio.to_thread(chat.cold, messages)), reply.raw
    return reply.route, reply.miss


async def eventually_warm(chat: Chat) -> None:
    """Waits until the second turn of a conversation is warm."""

    async def warm() -> bool:
        return await route_of(chat, await finished_turn(chat)) == ("warm", "")

    await eventually(warm, WARM_S)


def retained(stack: Stack) -> dict[str, int]:
    """Returns what the decode engine keeps of finished turns: sets, blocks, and sets that have a deadline."""
    (rank,) = Ledgers().collect([stack.node("decode-1").url])
    kept: dict[str, int] = rank["retained"]["claimed"]
    return kept


async def retain_at_decode(stack: Stack, chat: Chat, count: int) -> None:
    """Has the decode engine finish turns that are labelled as a router's are, and have nearly all blocks in common."""
    url = f"{stack.node('decode-1').url}/v1/completions"

    def one(number: int) -> None:
        label = {"scope": "filling", "keys": [f"filling-{number}"]}
        prompt = [token % 1_000 for token in range(REPORT_TOKENS)]
        body: dict[str, Any] = {"model": stack.model_name, "prompt": prompt, "max_tokens": 1}
        answer = chat.http.post(url, json={**body, "kv_transfer_params": {PARAMS_KEY: label}})
        assert answer.status_code == 200, answer.text

    for begin in range(0, count, 10):
        await asyncio.gather(*(asyncio.to_thread(one, number) for number in range(begin, min(begin + 10, count))))


async def knows_sets(address: str, count: int) -> bool:
    """Tells whether an agent has been told of so many sets."""
    async with open_channel(address) as channel:
        request = agent_pb2.ListBlockSetsRequest(page_size=1_000)
        listing = await agent_pb2_grpc.BlockSetServiceStub(channel).ListBlockSets(request, timeout=10)
        return len(listing.block_sets) >= count


def dropped_counts(stack: Stack, name: str, pattern: str) -> list[int]:
    """Returns the counts that a process has logged."""
    return [int(count) for count in re.findall(pattern, stack.process(name).log_tail(10**6))]


async def test_what_a_full_connector_socket_cost_is_counted_and_told_again(stack: Stack, chat: Chat) -> None:
    # What they have in common is computed once: the agent is left after 10 s of silence.
    await retain_at_decode(stack, chat, 1)
    messages = opening()
    stack.freeze("agent-decode-1")
    try:
        await retain_at_decode(stack, chat, FILLING_TURNS)
        # Nobody is told of this one: its report is dropped.
        unreported = await asyncio.to_thread(chat.send, messages)
        assert retained(stack)["sets"] >= FILLING_TURNS
    finally:
        stack.thaw("agent-decode-1")

    # A turn may be warm before that: by a second chance, which needs no connector.
    await eventually(lambda: knows_sets(stack.node("decode-1").agent_address, FILLING_TURNS + 1), WARM_S)
    assert unreported.text == await asyncio.to_thread(chat.cold, messages)
    assert await route_of(chat, answered(messages, unreported.text)) == ("warm", "")
    assert sum(dropped_counts(stack, "decode-1", r"told all anew \((\d+) dropped so far\)")) > MAX_QUEUED
    assert (
        sum(dropped_counts(stack, "agent-decode-1", r'"count": (\d+), "event": "connector dropped messages"'))
        > MAX_QUEUED
    )
    await eventually(lambda: retained(stack)["sets"] == 0, TTL_S + 15)


@asynccontextmanager
async def calls_in_flight(address: str) -> AsyncIterator[Callable[[int], None]]:
    """Gives what begins so many calls of an agent, whose requests stay on their way until the block ends."""
    calls: list[grpc.aio.StreamUnaryCall[Any, Any]] = []
    async with open_channel(address) as channel:
        call: grpc.aio.StreamUnaryMultiCallable[Any, Any] = channel.stream_unary(
            "/backhaul.agent.v1.BlockSetService/ListBlockSets"
        )
        yield lambda count: calls.extend(call(timeout=120) for _ in range(count))
        for begun in calls:
            begun.cancel()


async def refusal_of(address: str) -> BackhaulError | None:
    """Returns why an agent refuses a call; None when it answers."""
    async with open_channel(address) as channel:
        try:
            await agent_pb2_grpc.BlockSetServiceStub(channel).ListBlockSets(
                agent_pb2.ListBlockSetsRequest(page_size=1), timeout=30
            )
        except grpc.aio.AioRpcError as error:
            return to_error(error)
    return None


async def test_an_agent_with_as_many_calls_as_it_may_run_refuses_claims_and_turns_are_cold(
    stack: Stack, chat: Chat
) -> None:
    address = stack.node("decode-1").agent_address
    async with calls_in_flight(address) as begin:
        begin(MAX_CALLS)

        async def full() -> bool:
            # The call that looks has a place itself, which another one may have wanted.
            begin(1)
            return await refusal_of(address) is not None

        await eventually(full, FILLED_S)
        refusal = await refusal_of(address)
        assert isinstance(refusal, ResourceExhaustedError)
        assert (refusal.reason, refusal.metadata["limit"]) == ("TOO_MANY_CALLS", str(MAX_CALLS))

        async def claim_refused() -> bool:
            route, miss = await route_of(chat, await finished_turn(chat))
            assert route == "cold"
            return miss == "owner_unavailable"

        await eventually(claim_refused, FILLED_S)

    await eventually_warm(chat)
    assert await refusal_of(address) is None


async def test_finished_turns_beyond_their_share_are_freed_and_later_ones_are_kept(stack: Stack, chat: Chat) -> None:
    share = int(BLOCKS * SHARE)
    for _ in range(LONG_TURNS):
        await finished_turn(chat, words=LONG_TURN_WORDS)

    await eventually(lambda: retained(stack)["blocks"] <= share, RELEASED_S)
    assert retained(stack)["sets"] > 0
    assert await route_of(chat, await finished_turn(chat)) == ("warm", "")
