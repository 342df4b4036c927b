"""Wires the registry and runs it."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog
from prometheus_client import CollectorRegistry

from backhaul.registry.v1.diagnosis_pb2_grpc import add_DiagnosisServiceServicer_to_server
from backhaul.registry.v1.registry_pb2_grpc import (
    add_IndexServiceServicer_to_server,
    add_NodeServiceServicer_to_server,
)
from backhaul_common.clock import SystemClock
from backhaul_common.errors import BackhaulError, UnavailableError
from backhaul_common.etcd import EtcdClient
from backhaul_common.exposition import MetricsEndpoint
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.tls import Identity, keep_current
from backhaul_registry.availability import Availability
from backhaul_registry.condition import Condition
from backhaul_registry.config import Config
from backhaul_registry.core.model import Node, Pointer
from backhaul_registry.diagnosis_service import SERVICE_NAME as DIAGNOSIS_NAME
from backhaul_registry.diagnosis_service import DiagnosisService
from backhaul_registry.etcd_store import NodeStore, PointerStore
from backhaul_registry.hub import Hub
from backhaul_registry.index_service import IndexService
from backhaul_registry.keys import Keys
from backhaul_registry.node_service import NodeService
from backhaul_registry.observing import observe_etcd, observe_watches
from backhaul_registry.records import Records
from backhaul_registry.traced_etcd import TracedEtcd

_log = structlog.get_logger(__name__)

WRITES = "backhaul.registry.v1.writes"
"""Health of this name: whether etcd takes writes. Lookups go on without."""

AGENTS_METHODS = ("JoinNode", "PublishBlockSets")
"""Methods that only agents call."""

SERVICE_NAMES = ("backhaul.registry.v1.IndexService", "backhaul.registry.v1.NodeService", DIAGNOSIS_NAME)


async def run(
    config: Config,
    stopping: asyncio.Event,
    on_listening: Callable[[int], None] = lambda _port: None,
    *,
    measured: CollectorRegistry | None = None,
) -> None:
    """Serves until ``stopping`` is set.

    Listens at once and says NOT_SERVING until etcd answers. ``on_listening`` is told the port. ``measured`` is what
    `listen_metrics` shows.
    """
    clock = SystemClock()
    keys = Keys(config.cluster)
    records = Records(keys)
    tls = Identity("services", config.tls_files) if config.tls_files else None
    etcd_tls = Identity("etcd", config.etcd_files) if config.etcd_files else None
    async with EtcdClient(config.etcd, tls=etcd_tls) as client:
        etcd = TracedEtcd(client)
        nodes: Hub[Node] = Hub(etcd, keys.nodes, records.read_node, clock, always=True)
        pointers: Hub[Pointer] = Hub(etcd, keys.index, records.read_pointer, clock, always=False)
        server = GrpcServer(
            address=config.listen,
            service_names=SERVICE_NAMES,
            health_names=(WRITES,),
            tls=tls,
            callers=config.tls_callers,
            callers_of=dict.fromkeys(AGENTS_METHODS, config.tls_agents),
        )
        node_service = NodeService(NodeStore(etcd, keys, records), nodes, stopping)
        index_service = IndexService(
            PointerStore(etcd, keys, records),
            pointers,
            stopping,
            ttl_s=config.pointer_ttl_s,
            etcd_answers=lambda: nodes.following,
        )
        add_NodeServiceServicer_to_server(node_service, server.server)
        add_IndexServiceServicer_to_server(index_service, server.server)
        add_DiagnosisServiceServicer_to_server(DiagnosisService(client, keys.nodes, clock), server.server)

        async def tell(problem: BackhaulError | None) -> None:
            await server.set_serving(problem is None)
            if problem is not None:
                # Another replica may still reach etcd; here the view would only grow old.
                away = UnavailableError("ETCD_UNAVAILABLE", "etcd does not answer this replica")
                nodes.end_all(away)
                pointers.end_all(away)

        async def tell_full(full: bool) -> None:
            await server.set_impaired(WRITES, full)

        availability = Availability(client, keys.nodes, clock, (tell,))
        condition = Condition(client, clock, tell_full)
        observe_etcd(availability, condition)
        observe_watches(nodes, pointers)
        async with AsyncExitStack() as entered, asyncio.TaskGroup() as tasks:
            if measured is not None:
                await entered.enter_async_context(MetricsEndpoint(config.listen_metrics, measured, tls=tls))
            await entered.enter_async_context(server)
            _log.info("listening", address=config.listen, port=server.port, etcd=config.etcd_endpoints)
            on_listening(server.port)
            background = [tasks.create_task(part.run()) for part in (availability, condition, nodes, pointers)]
            background.append(tasks.create_task(keep_current(tls, etcd_tls, clock=clock)))
            await stopping.wait()
            await server.stop(config.grace_s)
            for task in background:
                task.cancel()
    _log.info("stopped")
