"""Gathers the snapshot that `doctor` looks at. What does not answer is part of it; nothing here raises for that."""

import time
from dataclasses import replace

import grpc

from backhaul.agent.v1 import diagnosis_pb2
from backhaul.registry.v1 import diagnosis_pb2 as registry_diagnosis_pb2
from backhaul.registry.v1 import diagnosis_pb2_grpc as registry_diagnosis_grpc
from backhaul_cli import views
from backhaul_cli.core.snapshot import Agent, Clock, Node, Registry, Router, Snapshot
from backhaul_cli.services import Services, all_at_once, refused
from backhaul_cli.settings import Settings
from backhaul_cli.template_probes import probe_templates
from backhaul_common.errors import BackhaulError
from backhaul_common.grpc_client import to_error

_ETCD_S = 20.0
"""Longest wait for a registry that measures its etcd: a slow one is what is looked for."""


def collect(services: Services, settings: Settings, *, model: str, etcd_quota_bytes: int) -> Snapshot:
    """Asks everybody. ``model`` is the one whose template is tried; empty: each that is served, four at most."""
    registries = tuple(all_at_once(lambda address: _registry(services, address, settings), list(settings.registries)))
    nodes = _nodes(services)
    agents = list(all_at_once(lambda node: _agent(services, node, settings), list(nodes or ())))
    snapshot = Snapshot(
        registries=registries,
        nodes=nodes,
        agents={node.node_id: agent for node, agent in zip(nodes or (), agents, strict=True)},
        router=_router(services, settings),
        etcd_quota_bytes=etcd_quota_bytes,
    )
    if snapshot.router is None or snapshot.router.problem:
        return snapshot
    models = [model] if model else sorted({name for node in nodes or () for name in node.models})
    probes, problems = probe_templates(services, models)
    return replace(snapshot, templates=probes, template_problems=problems)


def _nodes(services: Services) -> tuple[Node, ...] | None:
    try:
        return tuple(map(views.node, services.nodes()))
    except BackhaulError:
        return None


def _registry(services: Services, address: str, settings: Settings) -> Registry:
    stub = registry_diagnosis_grpc.DiagnosisServiceStub(services.registry(address))
    sent_s = time.time()
    try:
        said = stub.Diagnose(registry_diagnosis_pb2.DiagnoseRequest(), timeout=max(_ETCD_S, settings.timeout_s))
    except grpc.RpcError as failure:
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return Registry(address=address, too_old=True, etcd_problem="it is too old to do so")
        error = to_error(failure)
        if error.reason.startswith("ETCD_"):
            return Registry(address=address, etcd_problem=str(error))
        return Registry(address=address, problem=str(error))
    received_s = time.time()
    # It measures etcd first, and then looks at its clock.
    clock = Clock(ahead_s=said.time.ToNanoseconds() / 1e9 - received_s, uncertainty_s=received_s - sent_s)
    return Registry(address=address, clock=clock, etcd=views.etcd(said.etcd))


def _agent(services: Services, node: Node, settings: Settings) -> Agent:
    sent_s = time.time()
    try:
        said = services.diagnosis(node.agent_address).Diagnose(
            diagnosis_pb2.DiagnoseRequest(), timeout=settings.timeout_s
        )
    except grpc.RpcError as failure:
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return Agent(too_old=True)
        error = to_error(failure)
        return Agent(problem=str(error), refused=refused(error))
    except ValueError as error:
        # gRPC's own, for an address that is none.
        return Agent(problem=str(error))
    clock = views.clock(said.time.ToNanoseconds() / 1e9, sent_s=sent_s, received_s=time.time())
    return views.agent(said, clock)


def _router(services: Services, settings: Settings) -> Router:
    try:
        status, document = services.http("/ready")
    except BackhaulError as error:
        return Router(url=settings.router, problem=error.message)
    if status == 200:
        return Router(url=settings.router)
    reason = document.get("reason") if isinstance(document, dict) else None
    return Router(url=settings.router, not_ready=str(reason or f"it answers {status}"))
