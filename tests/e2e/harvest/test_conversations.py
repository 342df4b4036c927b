"""Streamed conversations through a router, whose turns are retained no more: warm by what is still cached."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import grpc
import httpx2
import pytest

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_local.engines import EngineOptions
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.harvest.chances import DIGEST, RETAIN_NOTHING, eventually
from tests.e2e.stack.chat import Chat, Messages, Reply, answered, opening
from tests.engine_fixtures import REAL
from tests.soak.ledgers import Ledgers

LEASE_S = 60.0
STOCK_AGENT = ("--weights-digest", DIGEST, "--engine-lease-s", str(LEASE_S))
BUDGET_S = 2.0
ROUTER = ("--prefer", "warm", "--lookup-budget-s", "0.5", "--harvest-budget-s", str(BUDGET_S))

pytestmark = pytest.mark.timeout(300)


def simulated(state: Path, connector: bool) -> StackOptions:
    flags = RETAIN_NOTHING if connector else STOCK_AGENT
    prefill = SimulatedEngine(lease_s=LEASE_S, agent_flags=flags, connector=connector)
    # Without the connector nobody claims what a decode engine would retain: it had better not.
    decode = prefill if connector else replace(prefill, flags=["--no-bidirectional"])
    return StackOptions(state=state, prefill=[prefill], decode=[decode], router_flags=ROUTER)


def real(state: Path, connector: bool, python: Path, model: Path) -> StackOptions:
    flags = RETAIN_NOTHING if connector else STOCK_AGENT
    named = {"backhaul_weights_digest": DIGEST} if connector else {}
    prefill = EngineOptions(lease_s=LEASE_S, extra_config=named, agent_flags=flags, connector=connector)
    decode = prefill if connector else replace(prefill, extra_config={"bidirectional_kv_xfer": False})
    return StackOptions(
        state=state, prefill=[prefill], decode=[decode], engine_python=python, model=model, router_flags=ROUTER
    )


class Scene:
    """A stack, a client of its router, and a look into the index."""

    def __init__(self, stack: Stack, chat: Chat, index: registry_pb2_grpc.IndexServiceStub, engine_id: str) -> None:
        self.stack = stack
        self.chat = chat
        self._index = index
        self._engine_id = engine_id

    def cached(self) -> set[tuple[str, str]]:
        """Returns set and key of what is said to be merely cached."""
        found = self._index.ListBlockSets(registry_pb2.ListBlockSetsRequest(page_size=5000), timeout=10).pointers
        return {(pointer.set_id, pointer.key) for pointer in found if pointer.cached}

    def forget(self, name: str) -> None:
        """Empties an engine's prefix cache."""
        url = self.stack.node(name).url
        eventually(lambda: httpx2.post(f"{url}/reset_prefix_cache", trust_env=False).json().get("success", True))

    def known(self, messages: Messages) -> str:
        """Returns the owner's words for how much of the first 250 tokens of a prompt its engine caches."""
        decode = self.stack.node("decode-1")
        asked = httpx2.post(f"{decode.url}/tokenize", json={"messages": messages}, trust_env=False)
        with grpc.insecure_channel(decode.agent_address) as channel, pytest.raises(grpc.RpcError) as refused:
            # Too few for a handle: the engine is not asked.
            agent_pb2_grpc.BlockSetServiceStub(channel).HarvestBlockSet(
                agent_pb2.HarvestBlockSetRequest(
                    set_id="none",
                    engine_id=self._engine_id,
                    scope="scope",
                    weights_digest=DIGEST,
                    model=self.stack.model_name,
                    token_ids=asked.json()["tokens"][:250],
                ),
                timeout=10,
            )
        return str(refused.value.details())

    def turn(self, messages: Messages) -> tuple[Reply, Messages]:
        """Runs a turn, its prefill engine's cache being empty; waits until it is cached and no more than that."""
        self.forget("prefill-1")
        before = self.cached()
        reply = self.chat.send(messages)
        assert reply.status == 200, reply.raw
        eventually(lambda: self.cached() - before)
        eventually(lambda: self.usage() == 0)
        return reply, answered(messages, reply.text)

    def usage(self) -> float:
        """Returns the share of the decode engine's blocks that are in use or retained."""
        lines = httpx2.get(f"{self.stack.node('decode-1').url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("simulated", "connector"), id="simulated, with the connector"),
        pytest.param(("simulated", "stock"), id="simulated, without it"),
        pytest.param(("real", "connector"), id="vLLM, with the connector", marks=REAL.marks),
        pytest.param(("real", "stock"), id="vLLM, without it", marks=REAL.marks),
    ],
)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    kind, variant = request.param
    state, connector = tmp_path_factory.mktemp("c"), variant == "connector"
    if kind == "simulated":
        options = simulated(state, connector)
    else:
        fixtures = request.getfixturevalue("engine_python"), request.getfixturevalue("tiny_model")
        options = real(state, connector, *fixtures)
    with Stack(options) as stack, grpc.insecure_channel(stack.registries[0]) as channel:
        chat = Chat(stack.routers[0])
        with closing(chat.http):
            nodes = registry_pb2_grpc.NodeServiceStub(channel)
            engine_id = eventually(lambda: _offered(nodes), 60)
            yield Scene(stack, chat, registry_pb2_grpc.IndexServiceStub(channel), engine_id)


def _offered(nodes: registry_pb2_grpc.NodeServiceStub) -> str:
    """Returns the engine with which second chances can be had, once all is there that they need."""
    listed = nodes.ListNodes(registry_pb2.ListNodesRequest(), timeout=10).nodes
    engines = [engine for node in listed for engine in node.engines]
    offered = next((engine.engine_id for engine in engines if engine.second_chance), "")
    return offered if {engine.weights_digest for engine in engines} == {DIGEST} else ""


def test_a_conversation_of_which_nothing_is_retained_is_warm_and_its_text_is_right(scene: Scene) -> None:
    reply, messages = scene.turn(opening())
    assert (reply.route, reply.miss) == ("cold", "first_turn")
    for _ in range(2):
        reply, following = scene.turn(messages)
        assert (reply.route, reply.miss) == ("warm", "")
        assert reply.headers["x-backhaul-source"] == "cached"
        assert reply.read > 256
        assert reply.text == scene.chat.cold(messages)
        messages = following
    ledgers = Ledgers()
    ledgers.collect(node.url for node in scene.stack.nodes)
    assert ledgers.forbidden() == {}


def test_a_prefix_that_is_evicted_costs_a_cold_turn(scene: Scene) -> None:
    _, messages = scene.turn(opening())
    scene.forget("decode-1")
    assert "caches 224 tokens" in scene.known(messages)
    # The engine says so with its next step.
    scene.chat.cold(opening(15), tokens=1)
    eventually(lambda: "caches 0 tokens" in scene.known(messages))
    reply = scene.chat.send(messages)
    assert (reply.route, reply.miss) == ("cold", "harvest:not_cached")
    assert reply.text == scene.chat.cold(messages)


def test_a_conversation_that_ends_has_no_second_chance(scene: Scene) -> None:
    session = f"session-{time.monotonic_ns()}"
    before = scene.cached()
    reply = scene.chat.send(messages := opening(), session=session)
    eventually(lambda: scene.cached() - before)
    eventually(lambda: scene.usage() == 0)
    ended = scene.chat.http.delete(f"/v1/conversations/{session}")
    assert (ended.status_code, ended.json()["released"]) == (200, 1)
    eventually(lambda: scene.cached() == before)
    reply = scene.chat.send(answered(messages, reply.text), session=session)
    assert (reply.route, reply.miss) == ("cold", "not_found")


def test_an_owner_that_is_silent_costs_the_budget(scene: Scene) -> None:
    _, messages = scene.turn(opening())
    agent = scene.stack.process(scene.stack.node("decode-1").agent)
    agent.freeze()
    try:
        begun = time.monotonic()
        reply = scene.chat.send(messages)
        took_s = time.monotonic() - begun
    finally:
        agent.thaw()
    assert (reply.route, reply.miss) == ("cold", "harvest_timeout")
    assert took_s > BUDGET_S
    assert reply.text == scene.chat.cold(messages)
