"""gRPC face by which operators learn how this agent and its engines are set up: `DiagnosisService`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from backhaul.agent.v1 import diagnosis_pb2, diagnosis_pb2_grpc
from backhaul_common.clock import time_of_day
from backhaul_common.durations import duration
from backhaul_node_agent.core.block_set import EngineFacts
from backhaul_node_agent.core.engine_clock import EngineClock

SERVICE_NAME = diagnosis_pb2.DESCRIPTOR.services_by_name["DiagnosisService"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """One engine of which a connector has spoken."""

    facts: EngineFacts
    clock: EngineClock | None
    """None while its connector is away."""
    retention_problem: str
    """Why its block sets cannot be renewed in time; empty when they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How an agent is set up, at one moment."""

    nixl_available: bool
    nixl_starting: bool
    kv_events: bool
    connector_socket: str
    engine_url_problem: str
    engines: Iterable[EngineSetup]


class DiagnosisServicer(diagnosis_pb2_grpc.DiagnosisServiceServicer):
    """Converts what the agent knows of itself."""

    def __init__(self, setup: Callable[[], Setup]) -> None:
        self._setup = setup

    async def Diagnose(
        self,
        request: diagnosis_pb2.DiagnoseRequest,
        context: grpc.aio.ServicerContext[diagnosis_pb2.DiagnoseRequest, diagnosis_pb2.DiagnoseResponse],
    ) -> diagnosis_pb2.DiagnoseResponse:
        """Says how this node is set up."""
        setup = self._setup()
        now = Timestamp()
        now.FromDatetime(time_of_day())
        return diagnosis_pb2.DiagnoseResponse(
            time=now,
            nixl=_nixl(setup),
            kv_events=setup.kv_events,
            connector_socket=setup.connector_socket,
            engine_url_problem=setup.engine_url_problem,
            engines=map(_engine, setup.engines),
        )


def _nixl(setup: Setup) -> "diagnosis_pb2.NixlState.ValueType":
    if setup.nixl_starting:
        return diagnosis_pb2.NIXL_STATE_STARTING
    return diagnosis_pb2.NIXL_STATE_AVAILABLE if setup.nixl_available else diagnosis_pb2.NIXL_STATE_MISSING


def _engine(engine: EngineSetup) -> diagnosis_pb2.EngineDiagnosis:
    facts, clock = engine.facts, engine.clock
    return diagnosis_pb2.EngineDiagnosis(
        engine_id=facts.engine_id,
        rank=facts.rank,
        connected=clock is not None,
        retention_ttl=duration(facts.ttl_s),
        lease=duration(facts.lease_s),
        side_channel_host=facts.side_channel_host,
        clock_known=clock is not None and clock.trusted,
        clock_jump_count=clock.jump_count if clock is not None else 0,
        retention_problem=engine.retention_problem,
    )
