"""Hand-offs between simulated engines that run the real connector: freed when nobody asks, repeated when they fail."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import pytest

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from backhaul_router.engine_client import KEEP_ALIVE_S
from tests.fakes.eventually import eventually
from tests.soak.network import BreakableNetwork

pytestmark = pytest.mark.timeout(120)

WORDS = " ".join(f"word{index}" for index in range(120))
LEASE_S = 15.0
"""More than agent (9 s) and router (1 s) need to notice that an engine is frozen."""
COLD_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def network() -> Iterator[BreakableNetwork]:
    with BreakableNetwork() as network:
        yield network


@pytest.fixture(scope="module")
def stack(network: BreakableNetwork, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # A prefill engine that soon takes blocks back and has few of them.
    prefill = SimulatedEngine(lease_s=LEASE_S, flags=["--block-size", "16", "--block-count", "64"])
    decode = SimulatedEngine(flags=["--block-size", "16"])
    options = StackOptions(
        state=tmp_path_factory.mktemp("s"),
        prefill=[prefill],
        decode=[decode],
        router_flags=["--prefer", "warm", "--gone-timeout-s", "1", "--lookup-budget-s", "1"],
        network=network,
    )
    with Stack(options) as stack:
        yield stack


@pytest.fixture(scope="module")
def patient_router(stack: Stack) -> str:
    """A router that waits for an engine however long it is away: then only the engines guard their blocks."""
    return stack.add_router(["--prefer", "warm", "--gone-timeout-s", "120", "--lookup-budget-s", "1"])


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=30, trust_env=False) as client:
        yield client


def body(stack: Stack, text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{text} {WORDS}"}]
    return {"model": stack.model_name, "messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}


def ledger(http: httpx2.Client, stack: Stack, name: str) -> Any:
    """Returns what a simulated engine has seen of reads and blocks."""
    (rank,) = http.get(f"{stack.node(name).url}/simulator/ledger").json()["ranks"]
    return rank


def handoffs(http: httpx2.Client, stack: Stack) -> int:
    """Returns how many hand-offs the prefill engine keeps blocks for."""
    return int(ledger(http, stack, "prefill-1")["retained"]["handoff"]["sets"])


async def test_a_hand_off_that_nobody_asked_for_is_freed_long_before_its_lease_ends(
    stack: Stack, http: httpx2.Client
) -> None:
    request = body(stack, "nobody", max_tokens=1, kv_transfer_params=COLD_PARAMS)
    reply = http.post(f"{stack.node('prefill-1').url}/v1/chat/completions", json=request).json()
    params = reply["kv_transfer_params"]
    assert handoffs(http, stack) == 1
    async with grpc.aio.insecure_channel(stack.node("prefill-1").agent_address) as channel:
        stub = agent_pb2_grpc.BlockSetServiceStub(channel)
        named = agent_pb2.ReleaseHandOffRequest(
            engine_id=params["remote_engine_id"], hand_off_id=params["remote_request_id"]
        )
        await stub.ReleaseHandOff(named, timeout=5)
    await eventually(lambda: handoffs(http, stack) == 0, LEASE_S / 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_that_decode_gave_up_has_the_text_that_it_would_have_had(
    stack: Stack, http: httpx2.Client, stream: bool
) -> None:
    request = body(stack, f"given up {stream}", stream=stream)
    expected = http.post(f"{stack.routers[0]}/v1/chat/completions", json=request)
    fault = {"next": [{"fault": "finish_error"}]}
    http.post(f"{stack.node('decode-1').url}/simulator/faults", json=fault).raise_for_status()
    got = http.post(f"{stack.routers[0]}/v1/chat/completions", json=request)
    assert (got.status_code, got.headers["x-backhaul-miss"]) == (200, "decode_failed")
    assert text_of(got.text) == text_of(expected.text)


async def test_the_clients_counts_are_prefills_for_the_prompt_and_decodes_for_the_answer(
    stack: Stack, http: httpx2.Client
) -> None:
    request = body(stack, "counted", stream=True, stream_options={"include_usage": True})
    first, second = [http.post(f"{stack.routers[0]}/v1/chat/completions", json=request).text for _ in range(2)]
    for raw, cached in ((first, False), (second, True)):
        (usage,) = [event["usage"] for event in events_in(raw) if event.get("usage")]
        assert usage["completion_tokens"] == 8
        assert usage["total_tokens"] == usage["prompt_tokens"] + 8
        assert bool(usage["prompt_tokens_details"]["cached_tokens"]) is cached


async def test_a_decode_engine_that_was_frozen_longer_than_its_blocks_are_kept_does_not_read_them(
    stack: Stack, http: httpx2.Client
) -> None:
    """vLLM would: it looks at no lease of a hand-off, and whoever reads late reads other requests' blocks."""
    request = body(stack, "frozen")
    right = alone(stack, http, request)
    # A connection that was kept open would end when the engine wakes, and its request with it.
    await asyncio.sleep(KEEP_ALIVE_S + 0.5)
    stack.freeze("decode-1")
    try:
        began = time.monotonic()
        got = await asyncio.to_thread(http.post, f"{stack.routers[0]}/v1/chat/completions", json=request)
        assert got.status_code == 503
        assert time.monotonic() - began < LEASE_S
        await asyncio.sleep(max(0.0, began + LEASE_S + 1 - time.monotonic()))
        for index in range(6):
            other = body(stack, f"other {index}", max_tokens=1)
            http.post(f"{stack.node('prefill-1').url}/v1/chat/completions", json=other).raise_for_status()
    finally:
        stack.thaw("decode-1")
    await answers_right(stack, http, stack.routers[0], request, right)
    assert ledger(http, stack, "decode-1")["wrong_reads_used"] == 0
    assert ledger(http, stack, "prefill-1")["reads_of_freed"] == 0


async def test_a_decode_engine_that_wakes_after_the_lease_of_a_hand_off_does_not_read_it(
    stack: Stack, http: httpx2.Client, patient_router: str
) -> None:
    request = body(stack, "woken")
    right, before = alone(stack, http, request), ledger(http, stack, "decode-1")
    faults = f"{stack.node('decode-1').url}/simulator/faults"
    http.post(faults, json={"next": [{"fault": "delay", "seconds": 1}]}).raise_for_status()
    turn = asyncio.create_task(asyncio.to_thread(http.post, f"{patient_router}/v1/chat/completions", json=request))
    await eventually(lambda: handoffs(http, stack) == 1)
    await eventually(lambda: not http.get(faults).json()["next"])
    stack.freeze("decode-1")
    try:
        await eventually(lambda: handoffs(http, stack) == 0, LEASE_S + 5)
        overwrite(stack, http)
    finally:
        stack.thaw("decode-1")
    got = await turn
    # Whether there is an answer depends on who sees first that the engine is back.
    assert got.status_code in (200, 503)
    assert got.status_code == 503 or text_of(got.text) == right
    after = ledger(http, stack, "decode-1")
    assert after["reads"]["handoff"]["failed"] == before["reads"]["handoff"]["failed"] + 1
    assert after["wrong_reads_used"] == ledger(http, stack, "prefill-1")["reads_of_freed"] == 0
    await answers_right(stack, http, patient_router, request, right)


async def test_a_read_that_was_cut_off_until_after_the_lease_of_its_hand_off_is_not_used(
    stack: Stack, network: BreakableNetwork, http: httpx2.Client, patient_router: str
) -> None:
    request = body(stack, "cut off")
    right, before = alone(stack, http, request), ledger(http, stack, "decode-1")
    link = network.link("engines > prefill-1")
    link.swallow()
    try:
        turn = asyncio.create_task(asyncio.to_thread(http.post, f"{patient_router}/v1/chat/completions", json=request))
        await eventually(lambda: handoffs(http, stack) == 1)
        await eventually(lambda: handoffs(http, stack) == 0, LEASE_S + 5)
        overwrite(stack, http)
    finally:
        link.heal()
    got = await turn
    assert (got.status_code, got.headers["x-backhaul-miss"], text_of(got.text)) == (200, "decode_failed", right)
    after = ledger(http, stack, "decode-1")
    assert after["late_reads_failed"] == before["late_reads_failed"] + 1
    assert after["wrong_reads_used"] == 0
    await answers_right(stack, http, patient_router, request, right)


def alone(stack: Stack, http: httpx2.Client, request: dict[str, Any]) -> str:
    """Returns what the decode engine answers by itself, with nothing that is cached or read."""
    salted = {**request, "cache_salt": "nobody else's"}
    return text_of(http.post(f"{stack.node('decode-1').url}/v1/chat/completions", json=salted).text)


def overwrite(stack: Stack, http: httpx2.Client) -> None:
    """Fills all of the prefill engine's blocks with other prompts."""
    for index in range(10):
        other = body(stack, f"other {index}", max_tokens=1)
        http.post(f"{stack.node('prefill-1').url}/v1/chat/completions", json=other).raise_for_status()


async def answers_right(stack: Stack, http: httpx2.Client, router: str, request: dict[str, Any], right: str) -> None:
    """Sees that the decode engine has cached nothing wrong, and that turns run over both engines again."""
    by_itself = http.post(f"{stack.node('decode-1').url}/v1/chat/completions", json=request)
    assert text_of(by_itself.text) == right
    await eventually(lambda: "true" in http.get(f"{router}/ready").text, 20)
    again = http.post(f"{router}/v1/chat/completions", json=request)
    assert (again.status_code, text_of(again.text)) == (200, right)


def events_in(raw: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: {")]
    return [json.loads(item) for item in data]


def text_of(raw: str) -> str:
    documents = events_in(raw) or [json.loads(raw)]
    choices = [choice for document in documents for choice in document["choices"]]
    return "".join((choice.get("delta") or choice["message"]).get("content") or "" for choice in choices)
