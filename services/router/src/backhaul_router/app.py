"""Wires the router."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from backhaul_common.clock import SystemClock
from backhaul_common.exposition import MetricsEndpoint
from backhaul_common.grpc_client import open_channel
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.tls import CallerContext, keep_current
from backhaul_router import configured
from backhaul_router.admission import Admission
from backhaul_router.answering import Answering, Knowledge, Others, answering
from backhaul_router.config import Config
from backhaul_router.console.service import ConsoleService
from backhaul_router.console.state import KEPT_TURNS
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.routing.assembly import Routing, assemble
from backhaul_router.core.scopes import Scopes
from backhaul_router.departures import Departures
from backhaul_router.engine_client import EngineClient
from backhaul_router.listeners import Identities, Listeners, listeners
from backhaul_router.load_reports import LoadReports
from backhaul_router.observing import TurnObserver, observe_nodes
from backhaul_router.open_files import allow_open_files
from backhaul_router.orphans import watch_orphans
from backhaul_router.owner_client import OwnerClient
from backhaul_router.readiness import Readiness
from backhaul_router.registry_client import RegistryClient
from backhaul_router.tenants_file import TenantsFile

_log = structlog.get_logger(__name__)

_FIRST_LIST_S = 2.0
"""How long a router that starts takes no connections, so that it need not refuse turns for want of nodes."""


@dataclass(frozen=True, slots=True)
class Running:
    """A router that runs."""

    http_port: int
    grpc_port: int
    ext_proc_port: int
    """Of the endpoint picker; 0 without one."""
    gateway_port: int
    """For gateways that plan turns; 0 without one."""
    console_port: int
    """Of the console; 0 without one."""
    table: NodeTable
    routing: Routing
    admission: Admission


async def serve(config: Config, stopping: asyncio.Event, measured: CollectorRegistry | None = None) -> None:
    """Runs the router until ``stopping`` is set, then lets clients go elsewhere and finishes running turns."""
    config = _affordable(config)
    async with running(config, measured) as router:
        settings = config.model_dump(mode="json")
        _log.info("router started", http_port=router.http_port, grpc_port=router.grpc_port, settings=settings)
        await stopping.wait()


def _affordable(config: Config) -> Config:
    """Returns what the limit on open files allows of a configuration, and says when that is less than all."""
    allowed = allow_open_files(config.open_files)
    affordable = config.within(allowed)
    if affordable is not config:
        _log.warning(
            "limit on open files too low, taking fewer connections and turns",
            allowed=allowed,
            needed=config.open_files,
            max_connections=affordable.max_connections,
            max_turns=affordable.max_turns,
            what_to_do="raise it (LimitNOFILE=, ulimit -Hn), or lower max_turns and max_connections",
        )
    return affordable


@asynccontextmanager
async def running(config: Config, measured: CollectorRegistry | None = None) -> AsyncIterator[Running]:
    """Starts a router; leaving stops it, in good order unless by an error.

    ``measured`` is what `listen_metrics` shows.

    Raises InvalidArgumentError for files that cannot be used, UnavailableError for addresses that cannot be bound.
    """
    known = _knowledge(config)
    identities = Identities(
        services=configured.identity("services", config.tls_files),
        clients=configured.identity("clients", config.client_files),
        engines=configured.identity("engines", config.engine_files),
    )
    changed = asyncio.Event()
    readiness = Readiness(known.table)
    departures = Departures(known.table, known.clock, patience_s=config.gone_timeout_s)
    async with _others(known, identities, on_change=changed.set) as others:
        observe_nodes(known.routing.live.breakers, known.table, lambda: others.registry.follows)
        answers = answering(known, others, departures)
        listening = listeners(known, others, answers, identities, readiness)
        if not await others.registry.listed(within_s=_FIRST_LIST_S):
            _log.warning("no list of nodes yet", registry=config.registry, what_to_do="see that a registry runs there")
        async with listening.opened(), _shown(config, measured, identities), asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(task)
                for task in (
                    departures.watch(),
                    listening.planned.watch(),
                    _follow(changed, known, listening, readiness, others.owner),
                    *_watches(known, others, answers, identities, on_change=changed.set),
                )
            ]
            try:
                yield _running(known, answers, listening)
                await listening.announce()
                _log.info("leaving", lame_duck_s=config.lame_duck_s, running_turns=answers.admission.turn_count)
                await known.clock.sleep(config.lame_duck_s)
            finally:
                await listening.stop(config.grace_s)
                for task in background:
                    task.cancel()


def _knowledge(config: Config) -> Knowledge:
    tenants, clock, table = configured.tenants(config), SystemClock(), NodeTable()
    observer = TurnObserver(clock, serves=table.serves)
    routing = assemble(
        table=table,
        monotonic=clock.monotonic,
        rng=random.Random(),
        settings=configured.routing_settings(config),
        policy=configured.route_policy(config),
        on_eject=observer.ejected,
    )
    return Knowledge(
        config=config,
        policy=configured.policy(config),
        tenants=tenants,
        scopes=Scopes(tenants, configured.cluster_key(config)),
        clock=clock,
        table=table,
        routing=routing,
        fresh=FreshKeys(clock.monotonic),
        observer=observer,
        journal=Journal(KEPT_TURNS if config.listen_console else 0, clock.monotonic),
    )


@asynccontextmanager
async def _others(known: Knowledge, identities: Identities, on_change: Callable[[], None]) -> AsyncIterator[Others]:
    config, clock, tls = known.config, known.clock, identities.services
    to_registries = partial(open_channel, tls=tls, name=config.tls_registry_name)
    to_agents = partial(open_channel, tls=tls, name=config.tls_agent_name)
    async with (
        RegistryClient(
            config.registry, table=known.table, clock=clock, on_change=on_change, connect=to_registries
        ) as registry,
        OwnerClient(clock=clock, connect=to_agents) as owner,
        EngineClient(
            timeouts=configured.timeouts(config),
            answer_bytes=int(config.answer_limit),
            late_limit=config.max_turns,
            tls=CallerContext(identities.engines) if identities.engines else None,
        ) as engines,
    ):
        yield Others(registry=registry, owner=owner, engines=engines)


@asynccontextmanager
async def _shown(config: Config, measured: CollectorRegistry | None, identities: Identities) -> AsyncIterator[None]:
    """Shows what is measured, if anything is."""
    if measured is None:
        yield
        return
    async with MetricsEndpoint(config.listen_metrics, measured, tls=identities.services):
        yield


def _watches(
    known: Knowledge, others: Others, answers: Answering, identities: Identities, on_change: Callable[[], None]
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yields what keeps the router up to date about others and about its own files."""
    clock, to_agents = known.clock, partial(open_channel, tls=identities.services, name=known.config.tls_agent_name)
    yield watch_orphans(known.table, others.engines, clock, on_change)
    yield LoadReports(known.table, known.routing.live.reports, clock, connect=to_agents).run()
    yield keep_current(identities.services, identities.clients, identities.engines, clock=clock)
    if isinstance(known.tenants, TenantsFile):
        yield known.tenants.follow(clock, answers.admission.limit)


def _running(known: Knowledge, answers: Answering, listening: Listeners) -> Running:
    return Running(
        http_port=listening.http.port,
        grpc_port=listening.grpc.port,
        ext_proc_port=_port(listening.picker_server),
        gateway_port=_port(listening.gateway_server),
        console_port=_port(listening.console),
        table=known.table,
        routing=known.routing,
        admission=answers.admission,
    )


def _port(server: GrpcServer | ConsoleService | None) -> int:
    return server.port if server else 0


async def _follow(
    changed: asyncio.Event, known: Knowledge, listening: Listeners, readiness: Readiness, owner: OwnerClient
) -> None:
    """Reports readiness, and drops what belongs to nodes that are gone, after each change of the nodes."""
    problem: str | None = None
    reuses: bool | None = None
    while True:
        await changed.wait()
        changed.clear()
        known.routing.follow({node.node_id for node in known.table})
        await owner.forget(owner.known() - {node.agent_address for node in known.table})
        before, problem = problem, readiness.problem()
        if problem != before:
            for server in listening.servers:
                await server.set_serving(not problem)
            _log.info("readiness changed", ready=not problem, reason=problem or None)
        if not problem and reuses is not known.table.reuses():
            reuses = known.table.reuses()
            _tell_reuse(reuses)


def _tell_reuse(reuses: bool) -> None:
    if reuses:
        _log.info("turns can reuse blocks")
    else:
        _log.warning("no turn can reuse blocks", reason="no pair has it on both sides: the nodes' records say why")
