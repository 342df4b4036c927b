"""Wires the router."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from backhaul.envoy.v3 import access_log_pb2_grpc, ext_proc_pb2_grpc
from backhaul.router.v1 import router_pb2_grpc
from backhaul_common.clock import SystemClock
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.grpc_server import GrpcServer
from backhaul_router.access_log_service import AccessLog
from backhaul_router.admission import Admission
from backhaul_router.attempts import Attempts
from backhaul_router.choosing import Chooser
from backhaul_router.config import Config
from backhaul_router.conversations import Conversations
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.queueing import TurnQueue
from backhaul_router.core.routing.assembly import Routing, assemble
from backhaul_router.core.routing.planner import RoutePolicy
from backhaul_router.core.routing.settings import RoutingSettings, parse_routing
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Tenants, parse_tenants
from backhaul_router.core.turn import Route
from backhaul_router.departures import Departures
from backhaul_router.engine_client import EngineClient, EngineTimeouts
from backhaul_router.ext_proc_service import HEALTH_NAMES, ExternalProcessor
from backhaul_router.ext_proc_service import SERVICE_NAME as EXT_PROC_NAME
from backhaul_router.grpc_service import SERVICE_NAME, InferenceService
from backhaul_router.http_protocol import ClientLimits
from backhaul_router.http_service import HttpService
from backhaul_router.legs import Legs
from backhaul_router.load_reports import LoadReports
from backhaul_router.lookups import Lookups
from backhaul_router.models import Models
from backhaul_router.observing import TurnObserver, observe_nodes
from backhaul_router.open_files import allow_open_files
from backhaul_router.orphans import watch_orphans
from backhaul_router.owner_client import OwnerClient
from backhaul_router.ports import Policy
from backhaul_router.prompt_tokens import PromptTokens
from backhaul_router.readiness import Readiness
from backhaul_router.registry_client import RegistryClient
from backhaul_router.second_chances import SecondChances
from backhaul_router.turns import Turns

_log = structlog.get_logger(__name__)

_MIN_CLUSTER_KEY_BYTES = 16
_FRAME_BYTES = 1024 * 1024
"""What a gRPC message may hold besides the body."""
_FIRST_LIST_S = 2.0
"""How long a router that starts takes no connections, so that it need not refuse turns for want of nodes."""


@dataclass(frozen=True, slots=True)
class Running:
    """A router that runs."""

    http_port: int
    grpc_port: int
    ext_proc_port: int
    """Of the endpoint picker; 0 without one."""
    table: NodeTable
    routing: Routing
    admission: Admission


async def serve(config: Config, stopping: asyncio.Event) -> None:
    """Runs the router until ``stopping`` is set, then lets clients go elsewhere and finishes running turns."""
    config = _affordable(config)
    async with running(config) as router:
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
async def running(config: Config) -> AsyncIterator[Running]:
    """Starts a router; leaving stops it, in good order unless by an error.

    Raises InvalidArgumentError for files that cannot be used, UnavailableError for addresses that cannot be bound.
    """
    tenants, policy = _tenants(config), _policy(config)
    scopes = Scopes(tenants, _cluster_key(config))
    clock = SystemClock()
    table, fresh, observer = NodeTable(), FreshKeys(clock.monotonic), TurnObserver(clock)
    routing = assemble(
        table=table,
        monotonic=clock.monotonic,
        rng=random.Random(),
        settings=_routing_settings(config),
        policy=_route_policy(config),
    )
    observe_nodes(routing.live.breakers)
    readiness, changed = Readiness(table), asyncio.Event()
    departures = Departures(table, clock, patience_s=config.gone_timeout_s)
    async with (
        RegistryClient(config.registry, table=table, clock=clock, on_change=changed.set) as registry,
        OwnerClient(clock=clock) as owner,
        EngineClient(
            timeouts=_timeouts(config), answer_bytes=int(config.answer_limit), late_limit=config.max_turns
        ) as engines,
    ):
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
        )
        conversations = Conversations(
            registry=registry, owner=owner, table=table, tenants=tenants, scopes=scopes, clock=clock
        )
        models = Models(engines, table)
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
            readiness=readiness,
            admission=admission,
            limits=_client_limits(config),
        )
        grpc_server = GrpcServer(
            address=config.listen_grpc,
            service_names=(SERVICE_NAME,),
            max_message_bytes=int(config.body_limit) + _FRAME_BYTES,
            max_calls=2 * config.max_turns + config.max_queued,
        )
        inference = InferenceService(
            turns=turns,
            conversations=conversations,
            models=models,
            admission=admission,
            body_limit_bytes=int(config.body_limit),
            send_s=config.send_timeout_s,
        )
        router_pb2_grpc.add_InferenceServiceServicer_to_server(inference, grpc_server.server)
        picker = ExternalProcessor(
            turns=turns,
            admission=admission,
            body_limit_bytes=int(config.body_limit),
            receive_s=config.receive_timeout_s,
        )
        access_log = AccessLog(table=table, routing=routing, observer=observer)
        picker_server = _picker_server(config, picker, access_log)
        servers = [server for server in (grpc_server, picker_server) if server is not None]
        if not await registry.listed(within_s=_FIRST_LIST_S):
            _log.warning("no list of nodes yet", registry=config.registry, what_to_do="see that a registry runs there")
        async with http, AsyncExitStack() as entered, asyncio.TaskGroup() as tasks:
            for server in servers:
                await entered.enter_async_context(server)
            background = (
                tasks.create_task(watch_orphans(table, engines, clock, changed.set)),
                tasks.create_task(departures.watch()),
                tasks.create_task(LoadReports(table, routing.live.reports, clock).run()),
                tasks.create_task(_follow(changed, table, routing, readiness, servers, owner)),
            )
            try:
                ext_proc_port = picker_server.port if picker_server else 0
                yield Running(http.port, grpc_server.port, ext_proc_port, table, routing, admission)
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


def _picker_server(config: Config, picker: ExternalProcessor, access_log: AccessLog) -> GrpcServer | None:
    """Returns the server of the endpoint picker, if there is to be one."""
    if not config.listen_ext_proc:
        return None
    server = GrpcServer(
        address=config.listen_ext_proc,
        service_names=(EXT_PROC_NAME,),
        health_names=HEALTH_NAMES,
        max_message_bytes=max(int(config.body_limit), int(config.answer_limit)) + _FRAME_BYTES,
        max_calls=2 * config.max_turns + config.max_queued,
    )
    ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, server.server)
    access_log_pb2_grpc.add_AccessLogServiceServicer_to_server(access_log, server.server)
    return server


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


def _timeouts(config: Config) -> EngineTimeouts:
    return EngineTimeouts(
        connect_s=config.connect_timeout_s,
        prefill_s=config.prefill_timeout_s,
        warm_prefill_s=config.warm_prefill_timeout_s,
        first_byte_s=config.first_byte_timeout_s,
        idle_s=config.idle_timeout_s,
    )


def _client_limits(config: Config) -> ClientLimits:
    return ClientLimits(
        body_bytes=int(config.body_limit),
        receive_s=config.receive_timeout_s,
        send_s=config.send_timeout_s,
        connections=config.max_connections,
        goodbyes=config.goodbyes,
    )


def _tenants(config: Config) -> Tenants:
    if not config.tenants_file:
        return Tenants()
    try:
        return parse_tenants(_read(config.tenants_file).decode())
    except ValueError as error:
        raise InvalidArgumentError("BAD_TENANTS_FILE", f"{config.tenants_file}: {error}") from error


def _cluster_key(config: Config) -> bytes:
    cluster_key = _read(config.cluster_key_file).strip() if config.cluster_key_file else b""
    if config.tenants_file and len(cluster_key) < _MIN_CLUSTER_KEY_BYTES:
        raise InvalidArgumentError(
            "NO_CLUSTER_KEY", f"tenants need cluster_key_file, with at least {_MIN_CLUSTER_KEY_BYTES} bytes in it"
        )
    return cluster_key


def _policy(config: Config) -> Policy:
    engine_key = _read(config.engine_key_file).decode().strip() if config.engine_key_file else ""
    return Policy(
        prefill_fallback=config.prefill_fallback,
        keep_constraints=tuple(part.lower() for part in config.keep_constraints),
        engine_key=engine_key,
        explain=config.explain,
    )


def _route_policy(config: Config) -> RoutePolicy:
    return RoutePolicy(
        routes=frozenset(map(Route, config.routes)),
        prefer=None if config.prefer == "auto" else Route(config.prefer),
        decode_computes=config.prefill_fallback == "decode",
    )


def _routing_settings(config: Config) -> RoutingSettings:
    if not config.routing_file:
        return RoutingSettings()
    try:
        return parse_routing(_read(config.routing_file).decode())
    except ValueError as error:
        raise InvalidArgumentError("BAD_ROUTING_FILE", f"{config.routing_file}: {error}") from error


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError("FILE_UNREADABLE", f"{path}: {error.strerror}") from error
