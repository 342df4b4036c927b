"""Stacks for all tests of this folder: one prefill and two decode nodes, then the other way round, of simulated engines
and then of real ones; and a router for each way of routing in front of the same engines."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from backhaul.agent.v1 import agent_pb2
from backhaul_local.engines import MODEL_NAME, EngineOptions
from backhaul_local.options import Engine as EngineOf
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from backhaul_router.core.lookup import scope_of
from tests.e2e.retention.owner import Owner
from tests.e2e.stack.chat import Chat, Messages, answered, opening
from tests.e2e.stack.conftest import eventually, eventually_warm
from tests.fakes.engine_pair import Engine

ROUTES = ("cold", "warm", "append")
TTL_S = 20.0
"""Of a decode engine's blocks, without a renewal."""
LEASE_S = 45.0
BLOCKS = 200
"""Of a decode engine, 32 tokens each."""
SOON_S = 10.0
"""Within which blocks are free again, and what was superseded is gone."""
TOKENS = 40
"""Of an answer."""
ROUTER = ("--lookup-budget-s", "0.5")
"""Generous: the engines of a test machine take all its cores."""

_MAX_MODEL_LEN = 4096


def _kind(engines: str, prefill: int, decode: int) -> Any:
    marks = [pytest.mark.engine] if engines == "real" else []
    return pytest.param((engines, prefill, decode), id=f"{engines}-{prefill}P{decode}D", marks=marks)


ONE_PREFILL = [_kind("simulated", 1, 2), _kind("real", 1, 2)]
ONE_DECODE = [_kind("simulated", 2, 1), _kind("real", 2, 1)]
BUT_ONE_REAL = [*ONE_PREFILL, ONE_DECODE[0]]
"""For what costs real engines time, and is the same however many of them there are."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells a stack of simulated engines from one of real ones."""

    stack: Stack
    nixl: Any
    """The module that makes NIXL agents that its engines hear."""


@pytest.fixture(scope="package", params=[*ONE_PREFILL, *ONE_DECODE])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    """The running stack of one kind: what holds for one must hold for the others."""
    engines, prefill, decode = request.param
    state = tmp_path_factory.mktemp("routing")
    if engines == "simulated":
        flags = {
            "max-model-len": _MAX_MODEL_LEN,
            "max-running": 8,
            "recompute-threshold": 1,
            # Slow enough that computing costs more than reading, as with any model.
            "prefill-tokens-per-s": 20_000,
            "decode-step-s": 0.005,
        }
        more = ["--store-responses", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]
        of_prefill: EngineOf = SimulatedEngine(lease_s=LEASE_S, flags=more)
        of_decode: EngineOf = SimulatedEngine(ttl_s=TTL_S, lease_s=LEASE_S, flags=[*more, "--block-count", str(BLOCKS)])
        with Stack(_options(state, [of_prefill] * prefill, [of_decode] * decode)) as stack:
            yield Kind(stack, importlib.import_module("backhaul_simulator.notifications"))
        return
    place = {"engine_python": request.getfixturevalue("engine_python"), "model": request.getfixturevalue("tiny_model")}
    of_prefill = EngineOptions(
        lease_s=LEASE_S,
        flags=("--max-model-len", str(_MAX_MODEL_LEN)),
        # Whatever can be read is read, so that short answers will do.
        extra_config={"kv_recompute_threshold": 1},
        env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"},
    )
    of_decode = replace(of_prefill, ttl_s=TTL_S, num_blocks=BLOCKS)
    with Stack(replace(_options(state, [of_prefill] * prefill, [of_decode] * decode), **place)) as stack:
        yield Kind(stack, importlib.import_module("nixl._api"))


def _options(state: Path, prefill: Sequence[EngineOf], decode: Sequence[EngineOf]) -> StackOptions:
    return StackOptions(
        state=state,
        prefill=prefill,
        decode=decode,
        agent_flags=[
            *("--lease-ttl-s", "3", "--claim-ttl-s", "7", "--max-retention-s", "60"),
            # A conversation is to be found however full its holder is.
            *("--pressure-mark", "1"),
        ],
        router_flags=["--prefer", "cold", *ROUTER],
    )


@pytest.fixture(scope="package")
def stack(kind: Kind) -> Stack:
    """The running stack."""
    return kind.stack


@pytest.fixture(scope="package")
def engines(kind: Kind) -> Iterator[dict[str, Engine]]:
    """All engines, without the routers, by their names."""
    with ExitStack() as exit_stack:
        engines = {
            node.name: Engine.of_stack(kind.stack, node, kind.nixl, ttl_s=TTL_S, lease_s=LEASE_S)
            for node in kind.stack.nodes
        }
        for engine in engines.values():
            exit_stack.callback(engine.close)
        yield engines


@dataclass(frozen=True, slots=True)
class Held:
    """A block set and the name of the decode node that holds it."""

    node: str
    block_set: agent_pb2.BlockSet


class Holders:
    """All decode nodes of a stack, by their names."""

    def __init__(self, stack: Stack, owners: Mapping[str, Owner]) -> None:
        self._stack = stack
        self._owners = owners

    def __getitem__(self, name: str) -> Owner:
        return self._owners[name]

    def sets(self, salt: str) -> list[Held]:
        """Returns what is held of conversations under a cache salt."""
        scope = scope_of(model=MODEL_NAME, cache_salt=salt, tenant="")
        return [
            Held(name, held) for name, owner in self._owners.items() for held in owner.sets() if held.scope == scope
        ]

    def one_set(self, salt: str, *before: Held) -> Held:
        """Waits until one set is held under a salt and none of those before; returns it."""
        ids = {held.block_set.set_id for held in before}
        eventually(lambda: len(found := self.sets(salt)) == 1 and found[0].block_set.set_id not in ids, within_s=SOON_S)
        return self.sets(salt)[0]

    def settle(self, salt: str) -> None:
        """Waits until no node holds more than one set of what was under a salt, nor any block besides."""

        def settled() -> bool:
            found = self.sets(salt)
            blocks = {held.node: held.block_set.block_count for held in found}
            return len(blocks) == len(found) and all(
                owner.used() == blocks.get(name, 0) for name, owner in self._owners.items()
            )

        eventually(settled, within_s=SOON_S)

    def release_all(self) -> None:
        """Releases all sets, and waits until no decode engine that runs has a block in use."""
        running = [owner for name, owner in self._owners.items() if self._stack.process(name).running]
        for owner in running:
            if sets := owner.sets():
                owner.release(*sets)
        eventually(lambda: all(owner.used() == 0 and not owner.sets() for owner in running), within_s=SOON_S)


@pytest.fixture(scope="package")
def all_holders(stack: Stack, engines: Mapping[str, Engine]) -> Iterator[Holders]:
    """All decode nodes, whatever they hold."""
    with ExitStack() as exit_stack:
        owners = {
            node.name: exit_stack.enter_context(Owner(stack, engines[node.name], block_count=BLOCKS, name=node.name))
            for node in stack.nodes
            if node.role == "decode"
        }
        yield Holders(stack, owners)


@pytest.fixture(scope="package")
def all_chats(stack: Stack) -> Iterator[dict[str, Chat]]:
    """A client of a router for each route, which prefers it; once reuse was seen to work."""
    with ExitStack() as exit_stack:
        urls = {"cold": stack.routers[0]}
        urls |= {route: stack.add_router(["--prefer", route, *ROUTER]) for route in ROUTES[1:]}
        chats = {route: Chat(url) for route, url in urls.items()}
        for chat in chats.values():
            exit_stack.callback(chat.http.close)
        eventually_warm(chats["warm"])
        yield chats


@pytest.fixture
def holders(all_holders: Holders, all_chats: Mapping[str, Chat]) -> Iterator[Holders]:
    """All decode nodes. Nothing of what a test leaves there is held any longer."""
    all_holders.release_all()
    yield all_holders
    all_holders.release_all()


@pytest.fixture
def chats(all_chats: dict[str, Chat], holders: Holders) -> dict[str, Chat]:
    """A client for each route, by the route that its router prefers; nothing is held of earlier tests."""
    return all_chats


@pytest.fixture
def new_router(stack: Stack, tmp_path: Path) -> Iterator[Callable[[str], Chat]]:
    """Starts a router that has seen nothing yet and routes by estimate, with limits of its own; returns its client."""
    with ExitStack() as exit_stack:

        def start(limits: str) -> Chat:
            path = tmp_path / "routing.toml"
            path.write_text(f"[limits]\n{limits}\n")
            url = stack.add_router(["--routing-file", str(path), "--explain", *ROUTER])
            chat = Chat(url, headers={"x-backhaul-explain": "on"})
            exit_stack.callback(chat.http.close)
            return chat

        yield start


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn and the right answer to it."""

    messages: Messages
    text: str


def script(chat: Chat, questions: Sequence[str], *, words: int = 300, tokens: int = TOKENS) -> list[Turn]:
    """Returns a conversation with the right answers: each computed from nothing."""
    turns: list[Turn] = []
    messages = opening(words)
    for question in (*questions, ""):
        turns.append(Turn(messages, chat.cold(messages, tokens=tokens)))
        messages = answered(messages, turns[-1].text, question)
    return turns
