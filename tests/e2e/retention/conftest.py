"""One stack for all tests of this folder, of simulated engines and then of real ones: a small decode engine whose own
time is short, beside an agent with a small budget."""

import importlib
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from backhaul_local.engines import BLOCK_SIZE, EngineOptions
from backhaul_local.options import Engine as EngineOf
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Node, Stack
from tests.e2e.retention.owner import Owner
from tests.e2e.stack.chat import Chat
from tests.e2e.stack.conftest import eventually, eventually_warm
from tests.engine_fixtures import REAL
from tests.fakes.engine_pair import Engine

TTL_S = 20.0
"""Of the decode engine's blocks, without a renewal."""
LEASE_S = 45.0
"""Two thirds of it is what a renewal is good for."""
MAX_RETENTION_S = 60.0
CLAIM_TTL_S = 7.0
LEASE_TTL_S = 3.0
RETAINED_SHARE = 0.35
BLOCKS = 200
"""Of the decode engine, 32 tokens each."""
SEQUENCES = 8
"""Requests that run at once on an engine."""
SOON_S = 2.0
"""Within which blocks are free again on an idle engine."""

_MAX_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells a stack of simulated engines from one of real ones."""

    stack: Stack
    nixl: Any
    """The module that makes NIXL agents that its engines hear."""
    vocabulary: Sequence[int]


@pytest.fixture(scope="package", params=["simulated", REAL])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    """The running stack of either kind: what holds for the one must hold for the other."""
    state = tmp_path_factory.mktemp("retention")
    if request.param == "simulated":
        flags = {"max-model-len": _MAX_MODEL_LEN, "max-running": SEQUENCES, "decode-step-s": 0.005}
        more = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        prefill: EngineOf = SimulatedEngine(flags=more)
        decode: EngineOf = SimulatedEngine(ttl_s=TTL_S, lease_s=LEASE_S, flags=[*more, "--block-count", str(BLOCKS)])
        with Stack(_options(state, prefill, decode)) as stack:
            yield Kind(stack, importlib.import_module("backhaul_simulator.notifications"), range(300, 40_000))
        return
    python: Path = request.getfixturevalue("engine_python")
    model: Path = request.getfixturevalue("tiny_model")
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"].values()
    length = ("--max-model-len", str(_MAX_MODEL_LEN))
    prefill = EngineOptions(flags=length)
    decode = EngineOptions(ttl_s=TTL_S, lease_s=LEASE_S, num_blocks=BLOCKS, flags=length)
    with Stack(replace(_options(state, prefill, decode), engine_python=python, model=model)) as stack:
        yield Kind(stack, importlib.import_module("nixl._api"), [token for token in vocabulary if token > 300])


def _options(state: Path, prefill: EngineOf, decode: EngineOf) -> StackOptions:
    return StackOptions(
        state=state,
        prefill=[prefill],
        decode=[decode],
        agent_flags=[
            *("--lease-ttl-s", str(LEASE_TTL_S), "--claim-ttl-s", str(CLAIM_TTL_S)),
            *("--max-retention-s", str(MAX_RETENTION_S), "--retained-share", str(RETAINED_SHARE)),
            # For a turn that runs on a machine whose cores are all taken.
            *("--drain-s", "60"),
        ],
        # Generous: the engines of a test machine take all its cores.
        router_flags=["--prefer", "warm", "--lookup-budget-s", "0.5"],
    )


@pytest.fixture(scope="package")
def stack(kind: Kind) -> Stack:
    """The running stack."""
    return kind.stack


@pytest.fixture(scope="package")
def prefill(kind: Kind) -> Iterator[Engine]:
    """The prefill engine, without the router."""
    yield from _engine(kind, kind.stack.node("prefill-1"))


@pytest.fixture(scope="package")
def decode(kind: Kind) -> Iterator[Engine]:
    """The decode engine, without the router."""
    yield from _engine(kind, kind.stack.node("decode-1"))


def _engine(kind: Kind, node: Node) -> Iterator[Engine]:
    engine = Engine.of_stack(kind.stack, node, kind.nixl, ttl_s=TTL_S, lease_s=LEASE_S)
    yield engine
    engine.close()


@pytest.fixture(scope="package")
def any_owner(stack: Stack, decode: Engine) -> Iterator[Owner]:
    """The decode node, whatever it retains."""
    with Owner(stack, decode, block_count=BLOCKS) as owner:
        yield owner


@pytest.fixture(scope="package")
def any_chat(stack: Stack) -> Iterator[Chat]:
    """A client, once a conversation was seen to be warm."""
    with ExitStack() as exit_stack:
        chat = Chat(stack.routers[0])
        exit_stack.callback(chat.http.close)
        eventually_warm(chat)
        yield chat


@pytest.fixture
def chat(any_chat: Chat, any_owner: Owner) -> Chat:
    """A client; nothing of what earlier tests did is retained."""
    if sets := any_owner.sets():
        any_owner.release(*sets)
    # Hand-offs that nobody read end with their lease.
    eventually(lambda: not any_owner.sets() and any_owner.used() == 0, within_s=LEASE_S + 30)
    return any_chat


@pytest.fixture
def owner(any_owner: Owner, chat: Chat) -> Owner:
    """The decode node, with nothing retained by earlier tests."""
    return any_owner


class Foreign:
    """Blocks that the decode engine keeps for others: a hand-off, as any engine makes them, and a fresh handle."""

    def __init__(self, owner: Owner, vocabulary: Sequence[int]) -> None:
        self._engine = owner.engine
        eventually(owner.hears_the_engine, within_s=30)
        before = owner.used()
        # Not what an earlier test's agent knew to be cached.
        prompt, cached = random.choices(vocabulary, k=300), random.choices(vocabulary, k=400)
        hand_off = self._engine.complete(prompt, {"do_remote_decode": True, "do_remote_prefill": False}, 1)
        self._engine.complete(cached, None, 1)
        self._names = [hand_off.params["remote_request_id"], owner.harvest(cached)]
        self.block_count = owner.used() - before
        """Blocks."""
        assert self.block_count >= (300 + 400) // BLOCK_SIZE

    def keep(self) -> None:
        """Has the engine keep them for another two thirds of its lease."""
        for name in self._names:
            self._engine.nixl.renew(name)

    def free(self) -> None:
        """Has the engine free them."""
        for name in self._names:
            self._engine.nixl.release(name)


@pytest.fixture
def foreign(owner: Owner, kind: Kind) -> Iterator[Foreign]:
    """Leases of the decode engine that are no block sets, and nobody's to free but their readers'."""
    foreign = Foreign(owner, kind.vocabulary)
    yield foreign
    foreign.free()
