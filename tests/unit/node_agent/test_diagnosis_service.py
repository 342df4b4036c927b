"""What an agent says of how it is set up."""

from datetime import UTC, timedelta
from typing import Any

import pytest

from backhaul.agent.v1 import diagnosis_pb2 as pb
from backhaul_common.clock import time_of_day
from backhaul_common.durations import seconds
from backhaul_node_agent.core.engine_clock import EngineClock
from backhaul_node_agent.diagnosis_service import DiagnosisServicer, EngineSetup, Setup
from tests.unit.node_agent.owned import facts

RUNS = EngineClock().observe(sent=1.0, engine_now=5.0, received=1.001)
JUMPED = RUNS.observe(sent=2.0, engine_now=99.0, received=2.001)


async def told(**given: Any) -> pb.DiagnoseResponse:
    well: dict[str, Any] = {
        "nixl_available": True,
        "nixl_starting": False,
        "kv_events": True,
        "connector_socket": "/run/backhaul/d.sock",
        "engine_url_problem": "",
        "engines": (),
    }
    servicer = DiagnosisServicer(lambda: Setup(**{**well, **given}))
    context: Any = None
    return await servicer.Diagnose(pb.DiagnoseRequest(), context)


@pytest.mark.parametrize(
    ("available", "starting", "state"),
    [
        (True, False, pb.NIXL_STATE_AVAILABLE),
        (False, True, pb.NIXL_STATE_STARTING),
        (False, False, pb.NIXL_STATE_MISSING),
    ],
)
async def test_nixl_that_is_only_starting_is_not_missing(available: bool, starting: bool, state: int) -> None:
    assert (await told(nixl_available=available, nixl_starting=starting)).nixl == state


async def test_an_engine_is_told_with_its_lease_its_clock_and_what_keeps_it_from_retaining() -> None:
    setup = EngineSetup(facts=facts(), clock=JUMPED, retention_problem="too short")
    (said,) = (await told(engines=[setup])).engines
    assert (said.engine_id, seconds(said.lease)) == (facts().engine_id, facts().lease_s)
    assert (said.connected, said.clock_known, said.clock_jump_count) == (True, False, 1)
    assert said.retention_problem == "too short"


async def test_the_clock_of_a_connector_that_is_away_is_unknown() -> None:
    (said,) = (await told(engines=[EngineSetup(facts=facts(), clock=None, retention_problem="")])).engines
    assert (said.connected, said.clock_known) == (False, False)


async def test_the_time_of_day_is_told_in_utc() -> None:
    said = (await told()).time.ToDatetime(UTC)
    assert abs(said - time_of_day()) < timedelta(minutes=1)
