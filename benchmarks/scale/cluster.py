"""A whole control plane in one thread: one router, one registry, an agent for each engine, an etcd that counts."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from backhaul.registry.v1.registry_pb2_grpc import add_IndexServiceServicer_to_server, add_NodeServiceServicer_to_server
from backhaul_registry.core.model import Node as NodeRecord
from backhaul_registry.core.model import Pointer
from backhaul_registry.etcd_store import NodeStore, PointerStore
from backhaul_registry.hub import Hub
from backhaul_registry.index_service import IndexService
from backhaul_registry.keys import Keys
from backhaul_registry.node_service import NodeService
from backhaul_registry.records import Records
from backhaul_router.attempts import Attempts
from backhaul_router.choosing import Chooser
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.routing.assembly import assemble
from backhaul_router.core.routing.planner import RoutePolicy
from backhaul_router.core.routing.settings import RoutingSettings
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Tenants
from backhaul_router.departures import Departures
from backhaul_router.legs import Legs
from backhaul_router.load_reports import LoadReports
from backhaul_router.lookups import Lookups
from backhaul_router.observing import TurnObserver
from backhaul_router.owner_client import OwnerClient
from backhaul_router.ports import Policy
from backhaul_router.prompt_tokens import PromptTokens
from backhaul_router.registry_client import RegistryClient
from backhaul_router.second_chances import SecondChances
from backhaul_router.turns import Turns
from benchmarks.routing.clusters import DECODE, PREFILL
from benchmarks.scale.agents import Node
from benchmarks.scale.engines import Engines, VirtualEngine
from benchmarks.scale.etcd import CountingEtcd
from benchmarks.scale.meter import Meter
from benchmarks.scale.virtual import VirtualClock
from benchmarks.scale.wire import Network

ROUTER, ROUTER_IDLE, PLANNER = "router", "router, idle", "planner"
REGISTRY, REGISTRY_IDLE = "registry", "registry, idle"
"""Accounts: what turns cost, what time costs, and the planner's part of the router's turns."""

_REGISTRY_ADDRESS = "registry"
_POINTER_TTL_S = 30.0
_LISTED_S = 10.0


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster that runs."""

    turns: Turns
    engines: Engines
    etcd: CountingEtcd
    network: Network
    nodes: list[Node]
    table: NodeTable
    prompts: dict[str, int]
    """Tokens of the prompt that each conversation has just sent."""
    openings: dict[str, str]
    """Names of conversations by what is said first."""


@asynccontextmanager
async def cluster(prefill: int, decode: int, *, meter: Meter, clock: VirtualClock) -> AsyncIterator[Running]:
    """Starts so many engines and what belongs to them; leaving ends everything."""
    network, etcd = Network(meter), CountingEtcd()
    prompts: dict[str, int] = {}
    openings: dict[str, str] = {}
    engines = Engines(meter, prompts, openings)
    async with asyncio.TaskGroup() as tasks:
        started = [*_registry(etcd, network, clock, meter, tasks)]
        nodes = []
        for role, count, speed in (("prefill", prefill, PREFILL), ("decode", decode, DECODE)):
            for number in range(1, count + 1):
                engine = VirtualEngine(f"{role}-{number}", speed, meter, clock.monotonic)
                engines.by_id[engine.node_id] = engine
                nodes.append(Node(engine, role, registry=_REGISTRY_ADDRESS, network=network, clock=clock, meter=meter))
        started += [tasks.create_task(node.run()) for node in nodes]
        async with _router(engines, network, clock, meter, tasks, started) as (turns, table):
            async with asyncio.timeout(_LISTED_S):
                while len(table) < prefill + decode:
                    await clock.sleep(0.1)
            yield Running(turns, engines, etcd, network, nodes, table, prompts, openings)
        for task in started:
            task.cancel()


def _registry(
    etcd: Any, network: Network, clock: VirtualClock, meter: Meter, tasks: asyncio.TaskGroup
) -> list["asyncio.Task[None]"]:
    """Starts the registry, as in `backhaul_registry.app`."""
    keys, stopping = Keys("scale"), asyncio.Event()
    records = Records(keys)
    nodes: Hub[NodeRecord] = Hub(etcd, keys.nodes, records.read_node, clock, always=True)
    pointers: Hub[Pointer] = Hub(etcd, keys.index, records.read_pointer, clock, always=False)
    index = IndexService(
        PointerStore(etcd, keys, records), pointers, stopping, ttl_s=_POINTER_TTL_S, etcd_answers=lambda: True
    )
    server: Any = network.serve(_REGISTRY_ADDRESS, REGISTRY, idle=REGISTRY_IDLE)
    add_NodeServiceServicer_to_server(NodeService(NodeStore(etcd, keys, records), nodes, stopping), server)
    add_IndexServiceServicer_to_server(index, server)
    with meter.paying(REGISTRY_IDLE):
        return [tasks.create_task(nodes.run()), tasks.create_task(pointers.run())]


@asynccontextmanager
async def _router(
    engines: Any,
    network: Network,
    clock: VirtualClock,
    meter: Meter,
    tasks: asyncio.TaskGroup,
    started: list["asyncio.Task[None]"],
) -> AsyncIterator[tuple[Turns, NodeTable]]:
    """Starts a router, as in `backhaul_router.app`, without its servers."""
    table, fresh, policy = NodeTable(), FreshKeys(clock.monotonic), Policy()
    scopes, observer = Scopes(Tenants(), b"k" * 32), TurnObserver(clock, serves=table.serves)
    routing = assemble(
        table=table,
        monotonic=clock.monotonic,
        rng=random.Random(7),
        settings=RoutingSettings(),
        policy=RoutePolicy(),
        on_eject=observer.ejected,
    )
    planner: Any = _MeteredPlanner(routing.planner, meter)
    connect: Any = network.connect
    departures = Departures(table, clock, patience_s=15.0)
    reports = LoadReports(table, routing.live.reports, clock, connect=connect)

    def changed() -> None:
        routing.follow({node.node_id for node in table})

    with meter.paying(ROUTER_IDLE):
        registry = RegistryClient([_REGISTRY_ADDRESS], table=table, clock=clock, on_change=changed, connect=connect)
        started += [tasks.create_task(reports.run()), tasks.create_task(departures.watch())]
        entered = meter.within(ROUTER_IDLE, registry.__aenter__())
    await entered
    async with OwnerClient(clock=clock, connect=connect) as owner:
        tokens = PromptTokens(engines, clock)
        second_chances = SecondChances(
            owner=owner,
            tokens=tokens,
            table=table,
            planner=planner,
            clock=clock,
            budget_s=0.25,
            keep_constraints=policy.keep_constraints,
        )
        lookups = Lookups(
            registry=registry, owner=owner, tokens=tokens, table=table, fresh=fresh, clock=clock, budget_s=0.05
        )
        legs = Legs(
            engines=engines,
            owner=owner,
            live=routing.live,
            learning=routing.learning,
            departures=departures,
            policy=policy,
            observer=observer,
        )
        attempts = Attempts(
            legs=legs,
            table=table,
            planner=planner,
            live=routing.live,
            retries=routing.retries,
            policy=policy,
            observer=observer,
        )
        yield (
            Turns(
                chooser=Chooser(lookups=lookups, second_chances=second_chances, planner=planner, rates=routing.rates),
                attempts=attempts,
                legs=legs,
                table=table,
                live=routing.live,
                fresh=fresh,
                tenants=Tenants(),
                scopes=scopes,
                policy=policy,
                observer=observer,
                journal=Journal(0, clock.monotonic),
            ),
            table,
        )
    await registry.__aexit__(None, None, None)


class _MeteredPlanner:
    """The planner, with an account of its own."""

    def __init__(self, planner: Any, meter: Meter) -> None:
        self._planner = planner
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        method, meter = getattr(self._planner, name), self._meter

        def paid(*args: Any) -> Any:
            with meter.paying(PLANNER):
                return method(*args)

        return paid
