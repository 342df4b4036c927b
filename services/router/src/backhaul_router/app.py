"""Wires the router."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from backhaul_common.clock import SystemClock
from backhaul_common.exposition import MetricsEndpoint
from backhaul_common.grpc_client import open_channel
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.tls import CallerContext, keep_current
from backhaul_router import configured, grpc_servers
from backhaul_router.access_log_service import AccessLog
from backhaul_router.admission import Admission
from backhaul_router.attempts import Attempts
from backhaul_router.choosing import Chooser
from backhaul_router.config import Config
from backhaul_router.console.service import ConsoleService
from backhaul_router.console.state import KEPT_TURNS
from backhaul_router.console.wiring import console_for
from backhaul_router.conversation_service import ConversationService
from backhaul_router.conversations import Conversations
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.queueing import TurnQueue
from backhaul_router.core.routing.assembly import Routing, assemble
from backhaul_router.core.scopes import Scopes
from backhaul_router.departures import Departures
from backhaul_router.engine_client import EngineClient
from backhaul_router.ext_proc_service import ExternalProcessor
from backhaul_router.gateway_service import GatewayService
from backhaul_router.grpc_service import InferenceService
from backhaul_router.http_service import HttpService
from backhaul_router.legs import Legs
from backhaul_router.load_reports import LoadReports
from backhaul_router.lookups import Lookups
from backhaul_router.models import Models
from backhaul_router.observing import TurnObserver, observe_nodes
from backhaul_router.open_files import allow_open_files
from backhaul_router.orphans import watch_orphans
from backhaul_router.owner_client import OwnerClient
from backhaul_router.passing import Passing
from backhaul_router.planned_turns import PlannedTurns
from backhaul_router.prompt_tokens import PromptTokens
from backhaul_router.readiness import Readiness
from backhaul_router.registry_client import RegistryClient
from backhaul_router.second_chances import SecondChances
from backhaul_router.tenants_file import TenantsFile
from backhaul_router.transcoded_service import HttpApiService
from backhaul_router.turns import Turns

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
    tenants, policy = configured.tenants(config), configured.policy(config)
    scopes = Scopes(tenants, configured.cluster_key(config))
    clock = SystemClock()
    journal = Journal(KEPT_TURNS if config.listen_console else 0, clock.monotonic)
    tls = configured.identity("services", config.tls_files)
    client_tls = configured.identity("clients", config.client_files)
    engine_tls = configured.identity("engines", config.engine_files)
    to_registries = partial(open_channel, tls=tls, name=config.tls_registry_name)
    to_agents = partial(open_channel, tls=tls, name=config.tls_agent_name)
    table, fresh = NodeTable(), FreshKeys(clock.monotonic)
    observer = TurnObserver(clock, serves=table.serves)
    routing = assemble(
        table=table,
        monotonic=clock.monotonic,
        rng=random.Random(),
        settings=configured.routing_settings(config),
        policy=configured.route_policy(config),
        on_eject=observer.ejected,
    )
    readiness, changed = Readiness(table), asyncio.Event()
    departures = Departures(table, clock, patience_s=config.gone_timeout_s)
    async with (
        RegistryClient(
            config.registry, table=table, clock=clock, on_change=changed.set, connect=to_registries
        ) as registry,
        OwnerClient(clock=clock, connect=to_agents) as owner,
        EngineClient(
            timeouts=configured.timeouts(config),
            answer_bytes=int(config.answer_limit),
            late_limit=config.max_turns,
            tls=CallerContext(engine_tls) if engine_tls else None,
        ) as engines,
    ):
        observe_nodes(routing.live.breakers, table, lambda: registry.follows)
        tokens = PromptTokens(engines, clock)
        second_chances = SecondChances(
            owner=owner,
            tokens=tokens,
            table=table,
            planner=routing.planner,
            clock=clock,
            budget_s=config.harvest_budget_s,
            keep_constraints=policy.keep_constraints,
        )
        lookups = Lookups(
            registry=registry,
            owner=owner,
            tokens=tokens,
            table=table,
            fresh=fresh,
            clock=clock,
            budget_s=config.lookup_budget_s,
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
            planner=routing.planner,
            live=routing.live,
            retries=routing.retries,
            policy=policy,
            observer=observer,
        )
        chooser = Chooser(lookups=lookups, second_chances=second_chances, planner=routing.planner, rates=routing.rates)
        turns = Turns(
            chooser=chooser,
            attempts=attempts,
            legs=legs,
            table=table,
            live=routing.live,
            fresh=fresh,
            tenants=tenants,
            scopes=scopes,
            policy=policy,
            observer=observer,
            journal=journal,
        )
        conversations = Conversations(
            registry=registry, owner=owner, table=table, tenants=tenants, scopes=scopes, clock=clock
        )
        models = Models(engines, table)
        passing = Passing(
            engines=engines,
            table=table,
            planner=routing.planner,
            live=routing.live,
            tenants=tenants,
            scopes=scopes,
        )
        admission = Admission(
            turns=TurnQueue(max_turns=config.max_turns, max_queued=config.max_queued, limits=tenants.limits),
            queue_timeout_s=config.queue_timeout_s,
            max_held_bytes=int(config.max_held),
            clock=clock,
        )
        http = HttpService(
            address=config.listen_http,
            turns=turns,
            conversations=conversations,
            models=models,
            passing=passing,
            readiness=readiness,
            admission=admission,
            limits=configured.client_limits(config),
            tls=client_tls,
        )
        inference = InferenceService(
            turns=turns,
            conversations=conversations,
            models=models,
            admission=admission,
            body_limit_bytes=int(config.body_limit),
            send_s=config.send_timeout_s,
        )
        finding = ConversationService(
            conversations, admission, body_limit_bytes=int(config.body_limit), explain=config.explain
        )
        http_api = HttpApiService(
            turns=turns,
            conversations=conversations,
            models=models,
            admission=admission,
            body_limit_bytes=int(config.body_limit),
            send_s=config.send_timeout_s,
        )
        grpc_server = grpc_servers.client_server(config, inference, http_api, finding, client_tls)
        picker = ExternalProcessor(
            turns=turns,
            admission=admission,
            body_limit_bytes=int(config.body_limit),
            receive_s=config.receive_timeout_s,
        )
        access_log = AccessLog(table=table, routing=routing, observer=observer)
        picker_server = grpc_servers.picker_server(config, picker, access_log, tls)
        planned = PlannedTurns(
            turns=turns,
            admission=admission,
            clock=clock,
            send_s=config.plan_send_s,
            report_s=config.plan_report_s,
        )
        gateway = GatewayService(turns=turns, planned=planned, body_limit_bytes=int(config.body_limit))
        gateway_server = grpc_servers.gateway_server(config, gateway, tls)
        console = console_for(
            config,
            table=table,
            live=routing.live,
            journal=journal,
            registry=registry,
            owner=owner,
            scopes=scopes,
            tenants=tenants.configured,
            clock=clock,
            tls=client_tls,
        )
        servers = [server for server in (grpc_server, picker_server, gateway_server) if server is not None]
        if not await registry.listed(within_s=_FIRST_LIST_S):
            _log.warning("no list of nodes yet", registry=config.registry, what_to_do="see that a registry runs there")
        async with planned, http, AsyncExitStack() as entered, asyncio.TaskGroup() as tasks:
            if measured is not None:
                await entered.enter_async_context(MetricsEndpoint(config.listen_metrics, measured, tls=tls))
            for server in servers:
                await entered.enter_async_context(server)
            if console is not None:
                await entered.enter_async_context(console)
            background: tuple[asyncio.Task[None], ...] = (
                tasks.create_task(watch_orphans(table, engines, clock, changed.set)),
                tasks.create_task(departures.watch()),
                tasks.create_task(planned.watch()),
                tasks.create_task(LoadReports(table, routing.live.reports, clock, connect=to_agents).run()),
                tasks.create_task(_follow(changed, table, routing, readiness, servers, owner)),
                tasks.create_task(keep_current(tls, client_tls, engine_tls, clock=clock)),
            )
            if isinstance(tenants, TenantsFile):
                background += (tasks.create_task(tenants.follow(clock, admission.limit)),)
            try:
                ports = http.port, grpc_server.port, _port(picker_server), _port(gateway_server), _port(console)
                yield Running(*ports, table, routing, admission)
                await _leave(readiness, servers, http)
                _log.info("leaving", lame_duck_s=config.lame_duck_s, running_turns=admission.turn_count)
                await clock.sleep(config.lame_duck_s)
            finally:
                readiness.stop()
                picker.leave()
                access_log.leave()
                stops = (server.stop(config.grace_s) for server in servers)
                await asyncio.gather(http.stop(config.grace_s), *stops)
                for task in background:
                    task.cancel()


def _port(server: GrpcServer | ConsoleService | None) -> int:
    return server.port if server else 0


async def _leave(readiness: Readiness, servers: Sequence[GrpcServer], http: HttpService) -> None:
    """Says that the router is about to stop, while it still takes everything."""
    readiness.stop()
    for server in servers:
        await server.set_serving(False)
    http.leave()


async def _follow(
    changed: asyncio.Event,
    table: NodeTable,
    routing: Routing,
    readiness: Readiness,
    servers: Sequence[GrpcServer],
    owner: OwnerClient,
) -> None:
    """Reports readiness, and drops what belongs to nodes that are gone, after each change of the nodes."""
    ready: bool | None = None
    reuses: bool | None = None
    while True:
        await changed.wait()
        changed.clear()
        routing.follow({node.node_id for node in table})
        await owner.forget(owner.known() - {node.agent_address for node in table})
        problem = readiness.problem()
        if ready is not (not problem):
            ready = not problem
            for server in servers:
                await server.set_serving(ready)
            _log.info("readiness changed", ready=ready, reason=problem or None)
        if ready and reuses is not table.reuses():
            reuses = table.reuses()
            _tell_reuse(reuses)


def _tell_reuse(reuses: bool) -> None:
    if reuses:
        _log.info("turns can reuse blocks")
    else:
        _log.warning("no turn can reuse blocks", reason="no pair has it on both sides: the nodes' records say why")
