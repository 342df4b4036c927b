"""Puts together the listeners by which calls come: HTTP, gRPC, endpoint picker, gateways, console."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from backhaul_common.grpc_server import GrpcServer
from backhaul_common.tls import Identity
from backhaul_router import configured, grpc_servers
from backhaul_router.access_log_service import AccessLog
from backhaul_router.answering import Answering, Knowledge, Others
from backhaul_router.console.service import ConsoleService
from backhaul_router.console.wiring import console_for
from backhaul_router.conversation_service import ConversationService
from backhaul_router.ext_proc_service import ExternalProcessor
from backhaul_router.gateway_service import GatewayService
from backhaul_router.grpc_service import InferenceService
from backhaul_router.http_service import HttpService
from backhaul_router.planned_turns import PlannedTurns
from backhaul_router.readiness import Readiness
from backhaul_router.transcoded_service import HttpApiService


@dataclass(frozen=True, slots=True, kw_only=True)
class Identities:
    """What a router shows, and whom it trusts; None where it speaks without TLS."""

    services: Identity | None
    """To services and gateways."""
    clients: Identity | None
    engines: Identity | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """By what calls come."""

    http: HttpService
    grpc: GrpcServer
    picker_server: GrpcServer | None
    gateway_server: GrpcServer | None
    console: ConsoleService | None
    picker: ExternalProcessor
    access_log: AccessLog
    planned: PlannedTurns
    readiness: Readiness

    @property
    def servers(self) -> tuple[GrpcServer, ...]:
        """Those that speak gRPC."""
        return tuple(server for server in (self.grpc, self.picker_server, self.gateway_server) if server is not None)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Has them take calls. Raises UnavailableError for addresses that cannot be bound."""
        async with self.planned, self.http, AsyncExitStack() as entered:
            for server in self.servers:
                await entered.enter_async_context(server)
            if self.console is not None:
                await entered.enter_async_context(self.console)
            yield

    async def announce(self) -> None:
        """Says that the router is about to stop, while it still takes everything."""
        self.readiness.stop()
        for server in self.servers:
            await server.set_serving(False)
        self.http.leave()

    async def stop(self, grace_s: float) -> None:
        """Takes nothing more, and lets what runs end within ``grace_s``."""
        self.readiness.stop()
        self.picker.leave()
        self.access_log.leave()
        await asyncio.gather(self.http.stop(grace_s), *(server.stop(grace_s) for server in self.servers))


def listeners(
    known: Knowledge, others: Others, answers: Answering, identities: Identities, readiness: Readiness
) -> Listeners:
    """Returns the listeners that the configuration asks for. Raises InvalidArgumentError for unusable files."""
    config = known.config
    picker = ExternalProcessor(
        turns=answers.turns,
        admission=answers.admission,
        body_limit_bytes=int(config.body_limit),
        receive_s=config.receive_timeout_s,
    )
    access_log = AccessLog(table=known.table, routing=known.routing, observer=known.observer)
    planned = PlannedTurns(
        turns=answers.turns,
        admission=answers.admission,
        clock=known.clock,
        send_s=config.plan_send_s,
        report_s=config.plan_report_s,
    )
    gateway = GatewayService(turns=answers.turns, planned=planned, body_limit_bytes=int(config.body_limit))
    return Listeners(
        http=_http(known, answers, identities, readiness),
        grpc=_grpc(known, answers, identities),
        picker_server=grpc_servers.picker_server(config, picker, access_log, identities.services),
        gateway_server=grpc_servers.gateway_server(config, gateway, identities.services),
        console=_console(known, others, identities),
        picker=picker,
        access_log=access_log,
        planned=planned,
        readiness=readiness,
    )


def _http(known: Knowledge, answers: Answering, identities: Identities, readiness: Readiness) -> HttpService:
    return HttpService(
        address=known.config.listen_http,
        turns=answers.turns,
        conversations=answers.conversations,
        models=answers.models,
        passing=answers.passing,
        readiness=readiness,
        admission=answers.admission,
        limits=configured.client_limits(known.config),
        tls=identities.clients,
    )


def _grpc(known: Knowledge, answers: Answering, identities: Identities) -> GrpcServer:
    config = known.config
    inference = InferenceService(
        turns=answers.turns,
        conversations=answers.conversations,
        models=answers.models,
        admission=answers.admission,
        body_limit_bytes=int(config.body_limit),
        send_s=config.send_timeout_s,
    )
    conversations = ConversationService(
        answers.conversations, answers.admission, body_limit_bytes=int(config.body_limit), explain=config.explain
    )
    http_api = HttpApiService(
        turns=answers.turns,
        conversations=answers.conversations,
        models=answers.models,
        admission=answers.admission,
        body_limit_bytes=int(config.body_limit),
        send_s=config.send_timeout_s,
    )
    return grpc_servers.client_server(config, inference, http_api, conversations, identities.clients)


def _console(known: Knowledge, others: Others, identities: Identities) -> ConsoleService | None:
    return console_for(
        known.config,
        table=known.table,
        live=known.routing.live,
        journal=known.journal,
        registry=others.registry,
        owner=others.owner,
        scopes=known.scopes,
        tenants=known.tenants.configured,
        clock=known.clock,
        tls=identities.clients,
    )
