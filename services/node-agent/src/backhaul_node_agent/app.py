"""Wires the node agent and runs it from start to drain."""

import asyncio
import contextlib
import math
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog
import zmq.asyncio
from prometheus_client import CollectorRegistry

from backhaul.agent.v1 import agent_pb2_grpc, diagnosis_pb2_grpc
from backhaul_common.addresses import split_address
from backhaul_common.clock import Clock, SystemClock
from backhaul_common.errors import UnavailableError
from backhaul_common.exposition import MetricsEndpoint
from backhaul_common.grpc_client import open_channel
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.tls import CallerContext, Identity, keep_current
from backhaul_node_agent import convert
from backhaul_node_agent.agent import Agent
from backhaul_node_agent.config import Config
from backhaul_node_agent.connector_server import ConnectorServer
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import EngineFacts
from backhaul_node_agent.core.draining import Load
from backhaul_node_agent.core.engine_loads import EngineLoads
from backhaul_node_agent.core.life import Limits
from backhaul_node_agent.core.node import (
    Readiness,
    ServerFacts,
    SideChannelFacts,
    engine_url_problem,
    node_record,
    side_channel_problem,
)
from backhaul_node_agent.core.owner import Owner
from backhaul_node_agent.core.retention import renewing
from backhaul_node_agent.core.retention.gaps import Gaps
from backhaul_node_agent.core.retention.policy import Benefit, Lru, Policy
from backhaul_node_agent.diagnosis_service import SERVICE_NAME as DIAGNOSIS_SERVICE_NAME
from backhaul_node_agent.diagnosis_service import DiagnosisServicer, EngineSetup, Setup
from backhaul_node_agent.drain import Drain
from backhaul_node_agent.engine_probe import EngineProbe, SideChannel
from backhaul_node_agent.engine_requests import EngineRequests
from backhaul_node_agent.harvest import Harvest
from backhaul_node_agent.index import Index
from backhaul_node_agent.kv_events import KvEvents
from backhaul_node_agent.load_service import SERVICE_NAME as LOAD_SERVICE_NAME
from backhaul_node_agent.load_service import LoadServicer
from backhaul_node_agent.load_watch import LoadWatch
from backhaul_node_agent.nixl_notifier import EngineAddress, NixlNotifier, open_nixl
from backhaul_node_agent.node_session import NodeSession
from backhaul_node_agent.observing import observe_owner
from backhaul_node_agent.publishers import Publishers
from backhaul_node_agent.registries import Registries
from backhaul_node_agent.service import SERVICE_NAME, BlockSetServicer

_log = structlog.get_logger(__name__)

_CONNECTOR_S = 3.0
"""How long the first join waits for a connector; one that has lost its agent is back within 2 s."""
_TICK_S = 0.2
_GRACE_S = 1.0
_POLICIES: dict[str, Callable[[Gaps], Policy]] = {"lru": lambda _: Lru(), "benefit": Benefit}


class App:
    """One node agent. `run` owns every task and resource."""

    def __init__(
        self, config: Config, *, clock: Clock | None = None, measured: CollectorRegistry | None = None
    ) -> None:
        """`measured` is what `listen_metrics` shows."""
        self._config = config
        self._measured = measured
        self._clock = clock or SystemClock()
        self._session = secrets.token_hex(16)
        self._advertised_host, _ = split_address(config.advertised)
        self._side_host, self._side_port = split_address(config.side_channel)
        self._server_facts: ServerFacts | None = None
        self._side_channels: dict[int, SideChannelFacts] = {}
        self._shown_ranks: frozenset[int] = frozenset()
        """Data-parallel ranks of which the server has shown figures."""
        self._limits = Limits(
            claim_ttl_s=config.claim_ttl_s,
            margin_s=config.margin_s,
            retained_share=config.retained_share,
            pressure_mark=config.pressure_mark,
            max_retention_s=config.max_retention_s,
        )
        self._owner = Owner(session=self._session, limits=self._limits, policy=_POLICIES[config.retention_policy])
        self._engine_loads = EngineLoads(self._owner.free_block_count, self._owner.retention)
        self._warned: set[str] = set()
        self._left_out_count = 0
        self._ready: Readiness | None = None
        self._join_by = math.inf
        """Agent's clock: when the node joins even without a connector."""
        self.readiness_reason = ""
        """Why the node is not ready; empty when it is."""
        self.port = 0
        """Port of the gRPC server; known once it listens."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Runs until `stopping` is set, then drains. Raises BackhaulError when it cannot start."""
        config = self._config
        self._tls = Identity("services", config.tls_files) if config.tls_files else None
        self._engine_tls = Identity("engines", config.engine_files) if config.engine_files else None
        async with contextlib.AsyncExitStack() as stack:
            # zmq's term would wait for ever for a socket that was left open.
            context = zmq.asyncio.Context()
            stack.callback(context.destroy, linger=0)
            connect = partial(open_channel, tls=self._tls, name=config.tls_registry_name)
            registries = await stack.enter_async_context(Registries(config.registry, connect))
            channel = SideChannel(context)
            self._connectors = ConnectorServer(path=config.socket_path, session=self._session, clock=self._clock)
            self._node_session = NodeSession(
                registries=registries,
                ttl_s=config.lease_ttl_s,
                margin_s=config.lease_margin_s,
                clock=self._clock,
                on_taken=self._connectors.drop_connections,
            )
            self._publishers = Publishers(
                registries=registries, node_id=config.node, clock=self._clock, joined=self._node_session.joined
            )
            self._notifier = NixlNotifier(
                ask=channel.ask,
                address_of=self._address_of,
                open_agent=lambda: open_nixl(f"backhaul-{self._session[:12]}"),
            )
            events = KvEvents(context, config.kv_events_address, self._clock) if config.kv_events_address else None
            engine_tls = CallerContext(self._engine_tls) if self._engine_tls else None
            engine_key = _read_key(config.engine_key_file)
            requests = EngineRequests(config.engine_url, api_key=engine_key, tls=engine_tls)
            self._harvest = Harvest(
                owner=self._owner,
                events=events,
                requests=await stack.enter_async_context(requests),
                pointers=self._publishers,
                release=self._notifier.send,
                server=lambda: self._server_facts,
                clock=self._clock,
                limits=self._limits,
                weights_digest=config.weights_digest,
                engine_lease_s=config.engine_lease_s,
                ranks=self._ranks,
            )
            self._agent = Agent(
                owner=self._owner,
                clock=self._clock,
                connectors=self._connectors,
                index=Index(self._publishers, self._harvest),
                notifier=self._notifier,
                on_change=self._refresh,
            )
            self._drain = Drain(
                sets=self._agent,
                pointers=self._publishers,
                membership=self._node_session,
                clock=self._clock,
                on_change=self._refresh,
            )
            probe = EngineProbe(
                engine_url=config.engine_url,
                side_channel=split_address(config.side_channel),
                channel=channel,
                clock=self._clock,
                ranks=self._ranks,
                stall_s=config.stall_s,
                tls=engine_tls,
                api_key=engine_key,
            )
            self._load_watch = LoadWatch(self._engine_loads.loads, self._clock)
            grpc_server = GrpcServer(
                address=config.listen,
                service_names=[SERVICE_NAME, LOAD_SERVICE_NAME, DIAGNOSIS_SERVICE_NAME],
                tls=self._tls,
                callers=config.tls_callers,
            )
            agent_pb2_grpc.add_BlockSetServiceServicer_to_server(
                BlockSetServicer(self._agent, self._harvest, self._drain, drain_timeout_s=config.drain_timeout_s),
                grpc_server.server,
            )
            agent_pb2_grpc.add_LoadServiceServicer_to_server(LoadServicer(self._load_watch), grpc_server.server)
            diagnosis_pb2_grpc.add_DiagnosisServiceServicer_to_server(
                DiagnosisServicer(self._setup), grpc_server.server
            )
            self._observe()
            if self._measured is not None:
                endpoint = MetricsEndpoint(config.listen_metrics, self._measured, tls=self._tls)
                await stack.enter_async_context(endpoint)
            await stack.enter_async_context(grpc_server)
            self.port = grpc_server.port
            self._connectors.open()
            self._join_by = self._clock.monotonic() + _CONNECTOR_S
            stack.callback(self._connectors.close)
            _log.info("listening", address=config.listen, node=config.node, session=self._session, role=config.role)
            if problem := engine_url_problem(config.advertised_engine_url, self._advertised_host):
                _log.warning("engine not reachable from elsewhere", problem=problem)
            if self._tls and not config.advertised_engine_url.startswith("https:"):
                _log.warning("routers reach the engine without TLS", engine_url=config.advertised_engine_url)
            await self._run_tasks(grpc_server, probe, events, stopping)

    def _observe(self) -> None:
        observe_owner(
            self._owner,
            self._clock,
            ready=lambda: self._ready is Readiness.READY,
            foreign=lambda: self._connectors.foreign_count,
        )

    @property
    def can_notify(self) -> bool:
        """Whether engines can be told over NIXL."""
        return self._notifier.available

    @property
    def engine_ids(self) -> list[str]:
        """Engines that are known, by rank."""
        return [facts.engine_id for facts in self._owner.engines()]

    async def _run_tasks(
        self, grpc_server: GrpcServer, probe: EngineProbe, events: KvEvents | None, stopping: asyncio.Event
    ) -> None:
        hear = self._agent.hear
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._connectors.run(hear)),
                group.create_task(self._publishers.run(hear)),
                group.create_task(self._notifier.run()),
                group.create_task(self._node_session.run(hear)),
                group.create_task(probe.run(self._on_server, self._on_engine, self._harvest.on_engine, self._on_load)),
                group.create_task(self._leave()),
                group.create_task(self._tick()),
                group.create_task(keep_current(self._tls, self._engine_tls, clock=self._clock)),
            ]
            if events is not None:
                tasks.append(group.create_task(events.run(self._harvest.on_changes, self._harvest.on_lost)))
            await grpc_server.set_serving(True)
            await stopping.wait()
            await self._wind_down(grpc_server)
            for task in tasks:
                task.cancel()

    async def _leave(self) -> None:
        """Takes the node out of the directory when it is drained; its engine may then have another agent."""
        await self._drain.run()
        self._connectors.give_way()

    async def _wind_down(self, grpc_server: GrpcServer) -> None:
        """Drains the node, whose engine goes on. Every step has its limit."""
        self._load_watch.end()
        self._drain.ask(self._config.drain_s, retiring=False)
        await grpc_server.set_serving(False)
        await self._drain.over.wait()
        await grpc_server.stop(_GRACE_S)

    async def _tick(self) -> None:
        while True:
            self._agent.hear(ev.TimePassed())
            if self._notifier.available:
                self._agent.hear(ev.RetentionDue())
            self._harvest.tick()
            self._refresh()
            self._load_watch.tick()
            await self._clock.sleep(_TICK_S)

    def _on_server(self, facts: ServerFacts) -> None:
        self._server_facts = facts
        self._refresh()

    def _ranks(self) -> set[int]:
        """Returns the data-parallel ranks of the server: those that it shows, and those whose connectors have come.

        One that shows no figures is asked for rank 0, until a connector has come: a server of only some ranks may not
        have it, and another one may listen there.
        """
        return {*self._shown_ranks, *(facts.rank for facts in self._owner.engines())} or {0}

    def _on_load(self, load: Load) -> None:
        # A server that does not answer for a moment has the ranks that it had.
        self._shown_ranks = frozenset(load.figures) or self._shown_ranks
        self._engine_loads.see(load.figures, load.asked_at)
        self._drain.on_load(load)

    def _on_engine(self, rank: int, facts: SideChannelFacts) -> None:
        self._side_channels[rank] = facts
        for known in self._owner.engines():
            replaced = known.rank == rank and known.engine_id != facts.engine_id
            # An answer may be older than the connector's hello.
            if replaced and not self._owner.attached(known.engine_id):
                _log.info("engine restarted", rank=rank, old=known.engine_id, new=facts.engine_id)
                self._agent.hear(ev.EngineGone(known.engine_id))
        self._refresh()

    def _refresh(self) -> None:
        """Gives the directory the node's record as it is now."""
        if self._server_facts is None:
            # "Not asked yet" would take a node out of service whose agent has merely restarted.
            return
        engines = self._owner.engines()
        if self._ready is None and not engines and self._clock.monotonic() < self._join_by:
            # Nor may it lose its weights for a moment: routers would pair it with engines of other weights.
            return
        ranks = self._ranks()
        record = node_record(
            server=self._server_facts,
            engines=engines,
            side_channels={rank: facts for rank, facts in self._side_channels.items() if rank in ranks},
            connected=[facts.engine_id for facts in engines if self._owner.connected(facts.engine_id)],
            advertised_host=self._advertised_host,
            purging=self._publishers.purging,
            draining=self._drain.reason,
            retiring=self._drain.retiring,
            weights_digest=self._config.weights_digest,
            second_chances=self._harvest.offered_engines(),
            fenced=self._owner.fenced_engines(),
            ranks=ranks,
        )
        engine_ids = {engine.rank: engine.engine_id for engine in record.engines}
        self._engine_loads.name(engine_ids, self._clock.monotonic())
        if record.readiness is not self._ready:
            _log.info("node readiness changed", readiness=record.readiness.name, reason=record.reason)
            self._ready = record.readiness
        self.readiness_reason = record.reason
        if record.left_out_count != self._left_out_count:
            _log.warning("models or engines have no room in the node's record", left_out=record.left_out_count)
            self._left_out_count = record.left_out_count
        for facts in engines:
            self._warn(facts)
        self._node_session.update(
            convert.node(
                record,
                node_id=self._config.node,
                session=self._session,
                role=self._config.role,
                agent_address=self._config.advertised,
                engine_url=self._config.advertised_engine_url,
            )
        )

    def _warn(self, facts: EngineFacts) -> None:
        if facts.engine_id in self._warned:
            return
        self._warned.add(facts.engine_id)
        if problem := side_channel_problem(facts.side_channel_host, self._advertised_host):
            _log.warning("side channel not reachable from elsewhere", engine=facts.engine_id, problem=problem)
        if self._config.role == "decode" and (problem := renewing.problem(facts, self._limits)):
            _log.warning("block sets cannot be kept", engine=facts.engine_id, problem=problem)

    def _setup(self) -> Setup:
        config = self._config
        return Setup(
            nixl_available=self._notifier.available,
            nixl_starting=self._notifier.starting,
            kv_events=bool(config.kv_events),
            connector_socket=str(config.socket_path),
            engine_url_problem=engine_url_problem(config.advertised_engine_url, self._advertised_host),
            engines=[
                EngineSetup(
                    facts=facts,
                    clock=self._owner.clock(facts.engine_id),
                    retention_problem=renewing.problem(facts, self._limits) if config.role == "decode" else "",
                )
                for facts in self._owner.engines()
            ],
        )

    def _address_of(self, engine_id: str) -> EngineAddress | None:
        # The engine's own host name is how its peers reach it; beside it, the configured one does.
        for facts in self._owner.engines():
            if facts.engine_id == engine_id:
                return EngineAddress(self._side_host, facts.side_channel_port, facts.tp_size)
        for rank, side in self._side_channels.items():
            if side.engine_id == engine_id:
                return EngineAddress(self._side_host, self._side_port + rank, self._harvest.tp_size(engine_id))
        return None


def _read_key(path: str) -> str:
    """Reads the server's key; empty without a file. Raises UnavailableError (ENGINE_KEY) when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UnavailableError("ENGINE_KEY", f"engine_key_file cannot be read: {error}") from error
