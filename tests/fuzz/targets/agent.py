"""The agent's services."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

from google.protobuf.duration_pb2 import Duration

from backhaul.agent.v1 import agent_pb2 as pb
from backhaul.agent.v1 import diagnosis_pb2
from backhaul_common.errors import NotFoundError
from backhaul_node_agent.core.draining import DrainStatus, Phase
from backhaul_node_agent.core.engine_clock import EngineClock
from backhaul_node_agent.core.engine_loads import EngineLoad
from backhaul_node_agent.diagnosis_service import DiagnosisServicer, EngineSetup, Setup
from backhaul_node_agent.drain import Drain
from backhaul_node_agent.harvest import Harvest, Harvested, HarvestRequest
from backhaul_node_agent.load_service import LoadServicer
from backhaul_node_agent.load_watch import LoadWatch
from backhaul_node_agent.service import BlockSetServicer
from tests.fuzz.rpc import target_of
from tests.unit.node_agent.owned import facts
from tests.unit.node_agent.test_agent import Stage

_SERVICES = pb.DESCRIPTOR.services_by_name


class _NoHarvest:
    async def harvest(self, request: HarvestRequest, timeout_s: float) -> Harvested:
        raise NotFoundError("NOT_CACHED", "nothing is cached")

    def drop(self, set_id: str) -> bool:
        return False

    def release(self, engine_id: str, hand_off_id: str) -> bool:
        return False


class _Drain:
    def ask(self, within_s: float, *, retiring: bool) -> DrainStatus:
        return DrainStatus(Phase.DRAINING, within_s, 0, 0)


class _Watch:
    async def watch(self) -> AsyncGenerator[Sequence[EngineLoad]]:
        yield [EngineLoad("e", 1, 2, 0.5, 10)]


def _block_sets() -> BlockSetServicer:
    """Holds one set, `set-1` of `engine-1`."""
    agent, harvest, drain = Stage().agent, cast(Harvest, _NoHarvest()), cast(Drain, _Drain())
    return BlockSetServicer(agent, harvest, drain, drain_timeout_s=600.0)


def _load() -> LoadServicer:
    return LoadServicer(cast(LoadWatch, _Watch()))


def _diagnosis() -> DiagnosisServicer:
    engine = EngineSetup(facts=facts(), clock=EngineClock(), retention_problem="")
    setup = Setup(
        nixl_available=True,
        nixl_starting=False,
        kv_events=True,
        connector_socket="/run/backhaul/d.sock",
        engine_url_problem="",
        engines=[engine],
    )
    return DiagnosisServicer(lambda: setup)


_NAMES: dict[str, Any] = {"set_id": "set-1", "engine_id": "engine-1", "scope": "scope-1", "weights_digest": "weights"}

TARGETS = (
    target_of(
        "agent block sets",
        _SERVICES["BlockSetService"],
        _block_sets,
        {
            "ClaimBlockSet": [pb.ClaimBlockSetRequest(request_id="r", **_NAMES)],
            "ReturnBlockSet": [pb.ReturnBlockSetRequest(request_id="r")],
            "ReleaseBlockSets": [
                pb.ReleaseBlockSetsRequest(set_ids=["set-1", "b"]),
                pb.ReleaseBlockSetsRequest(scope="scope-1", keys=["key-of-set-1"]),
            ],
            "ReleaseHandOff": [pb.ReleaseHandOffRequest(engine_id="engine-1", hand_off_id="h")],
            "RenewBlockSets": [pb.RenewBlockSetsRequest(set_ids=["set-1", "b"])],
            "HarvestBlockSet": [pb.HarvestBlockSetRequest(model="m", cache_salt="s", token_ids=[1, 2, 3], **_NAMES)],
            "ListBlockSets": [pb.ListBlockSetsRequest(page_size=5, page_token="YQBi")],
            "Drain": [pb.DrainRequest(timeout=Duration(seconds=5))],
        },
    ),
    target_of("agent load", _SERVICES["LoadService"], _load, {"WatchLoad": [pb.WatchLoadRequest()]}),
    target_of(
        "agent diagnosis",
        diagnosis_pb2.DESCRIPTOR.services_by_name["DiagnosisService"],
        _diagnosis,
        {"Diagnose": [diagnosis_pb2.DiagnoseRequest()]},
    ),
)
