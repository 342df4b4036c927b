"""A console over a router that runs nothing: its nodes, loads and turns are what the test says."""

import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from backhaul_common.clock import Clock, SystemClock
from backhaul_common.errors import BackhaulError
from backhaul_common.tls import Identity
from backhaul_router.console.conversations import ConversationReader
from backhaul_router.console.service import PREFIX, ConsoleService
from backhaul_router.console.state import KEPT_TURNS, TICK_S, ConsoleState
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.claims import HeldSet
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.console.operators import Operators
from backhaul_router.core.lookup import TurnKeys
from backhaul_router.core.nodes import Engine, Node, NodeState, NodeTable, Role
from backhaul_router.core.routing.assembly import assemble
from backhaul_router.core.routing.planner import RoutePolicy
from backhaul_router.core.routing.reports import EngineReport, Retention
from backhaul_router.core.routing.settings import RoutingSettings
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Tenants
from backhaul_router.core.turn import Outcome, Route

MODEL = "tiny"


@dataclass
class FakeFinder:
    """Registry and owners at once."""

    follows: bool = True
    pointers: list[Pointer] = field(default_factory=list)
    held: list[HeldSet] = field(default_factory=list)
    lookups: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Scopes and keys that were looked up."""
    failure: BackhaulError | None = None
    """Answer to every lookup, when set."""
    silent: BackhaulError | None = None
    """Answer of every owner, when set."""

    async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> list[Pointer]:
        """Finds by key, in any scope."""
        self.lookups.append((scope, tuple(keys)))
        if self.failure is not None:
            raise self.failure
        return [pointer for key in keys for pointer in self.pointers if pointer.key == key]

    async def list_sets(self, address: str, set_ids: Collection[str], *, timeout_s: float) -> list[HeldSet]:
        """Lists what is held."""
        if self.silent is not None:
            raise self.silent
        return [one for one in self.held if one.set_id in set_ids]


@dataclass
class ToldTurn:
    """How a turn ends, and where it ran."""

    result: str = "ok"
    prefill: str = "prefill-1"
    decode: str = "decode-1"
    trace_id: str = ""


def node(name: str, role: Role = Role.DECODE, **changes: object) -> Node:
    """Returns a ready node with one engine, whose fields the changes name as well."""
    of_engine = {key: changes.pop(key) for key in [*changes] if key in Engine.__dataclass_fields__}
    engine: dict[str, Any] = {
        "engine_id": f"{name}-engine",
        "compatibility_hash": "hash",
        "weights_digest": "weights",
        "connector_version": "0.1.0",
        "reuse": True,
        "block_size": 16,
        "block_count": 20_000,
        "vllm_version": "0.32.0",
        "retention_ttl_s": 480.0,
        **of_engine,
    }
    fields: dict[str, Any] = {
        "node_id": name,
        "role": role,
        "agent_address": f"{name}:7201",
        "engine_url": f"http://{name}:8200",
        "models": frozenset({MODEL}),
        "engines": (Engine(**engine),),
        "state": NodeState.READY,
        **changes,
    }
    return Node(**fields)


class FakeConsole:
    """A console's state and what it stands on; `played` turns and `load` are what it shows."""

    def __init__(
        self, *nodes: Node, clock: Clock | None = None, tenants: Tenants | None = None, tick_s: float = TICK_S
    ) -> None:
        self.clock = clock or SystemClock()
        self.table = NodeTable()
        self.table.replace(nodes)
        self.journal = Journal(KEPT_TURNS, self.clock.monotonic)
        self.finder = FakeFinder()
        self.live = assemble(
            table=self.table,
            monotonic=self.clock.monotonic,
            rng=random.Random(7),
            settings=RoutingSettings(),
            policy=RoutePolicy(routes=frozenset(Route), prefer=None, decode_computes=True),
        ).live
        tenants = tenants or Tenants()
        self.scopes = Scopes(tenants, b"k" * 32)
        self.state = ConsoleState(
            table=self.table,
            live=self.live,
            journal=self.journal,
            registry=self.finder,
            clock=self.clock,
            tenants=tenants.configured,
            tick_s=tick_s,
        )
        self.reader = ConversationReader(
            registry=self.finder,
            owner=self.finder,
            table=self.table,
            journal=self.journal,
            scopes=self.scopes,
            tenants=tenants.configured,
        )

    def load(self, name: str, *, blocks: int = 0, limit: int = 10_000, running: int = 0, waiting: int = 0) -> None:
        """An agent says what its engine has to do, and what finished turns hold there."""
        retention = Retention(sets=blocks // 50, blocks=blocks, block_limit=limit)
        report = EngineReport(
            running, waiting, kv_usage=min(1.0, blocks / 20_000), free_blocks=None, retention=retention
        )
        self.live.reports.take_all(name, {f"{name}-engine": report})

    def play(
        self,
        outcome: Outcome,
        *,
        keys: TurnKeys | None = None,
        scope: str = "scope",
        tenant: str = "",
        model: str = MODEL,
        holder: str = "",
        told: ToldTurn | None = None,
        during: Callable[[], None] = lambda: None,
    ) -> int:
        """Plays one turn; returns its number."""
        with self.journal.turn("/v1/chat/completions", model, tenant, outcome) as entry:
            told = told or ToldTurn()
            entry.prefill, entry.decode, entry.trace_id = told.prefill, told.decode, told.trace_id
            outcome.result = told.result
            entry.keyed(scope, keys or TurnKeys((), (), continues=False))
            entry.holder = holder
            entry.began_at -= outcome.ttft_s or 0.0
            during()
        return entry.number

    @asynccontextmanager
    async def serving(
        self, *, operators: Operators | None = None, address: str = "127.0.0.1:0", tls: Identity | None = None
    ) -> AsyncIterator[str]:
        """Serves the console; yields its address."""
        service = ConsoleService(
            address=address,
            state=self.state,
            conversations=self.reader,
            operators=operators or Operators(),
            clock=self.clock,
            tls=tls,
        )
        async with service:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{service.port}{PREFIX}"


def cold(miss: str = "first_turn", *, prompt: int = 2000, ttft_s: float = 1.2) -> Outcome:
    """Returns the outcome of a cold turn."""
    outcome = Outcome(prompt_token_count=prompt, ttft_s=ttft_s, estimate_s=ttft_s * 0.9)
    outcome.miss = miss
    return outcome


def warm(*, prompt: int = 2400, local: int = 2000, read: int = 300, ttft_s: float = 0.15) -> Outcome:
    """Returns the outcome of a warm turn."""
    outcome = Outcome(ttft_s=ttft_s, estimate_s=ttft_s * 1.1)
    outcome.warm(cached=False, holder_id="d1", origin="")
    outcome.prompt_token_count, outcome.local_token_count, outcome.read_token_count = prompt, local, read
    return outcome


def appended(*, ttft_s: float = 0.08) -> Outcome:
    """Returns the outcome of an appended turn."""
    outcome = Outcome(ttft_s=ttft_s)
    outcome.append(holder_id="d1", origin="")
    return outcome
