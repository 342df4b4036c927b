"""The scheduler side of the stand-in connector, by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from backhaul_simulator import pull_scheduler
from backhaul_simulator.connector_base import KVConnectorOutput
from backhaul_simulator.engine_request import EngineRequest, RequestStatus
from backhaul_simulator.options import EngineOptions
from backhaul_simulator.pull_scheduler import PullConnectorScheduler
from backhaul_simulator.requests import Request
from backhaul_simulator.vllm_config import config_of

HANDOFF = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "prefill",
    "remote_request_id": "theirs",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}


def _scheduler(lease_s: float = 5.0) -> PullConnectorScheduler:
    # A lease of less than six seconds makes every step a heartbeat.
    options = EngineOptions(connector=False, lease_s=lease_s)
    return PullConnectorScheduler(config_of(options, rank=0, engine_id="decode"), "decode", host="127.0.0.1", port=1)


def _request(params: dict[str, Any]) -> EngineRequest:
    asked = Request(request_id="mine", prompt=[1] * 64, kv_transfer_params=dict(params))
    return EngineRequest(asked, request_id="mine", max_tokens=1, block_size=32)


def _beats(scheduler: PullConnectorScheduler) -> dict[str, set[str]]:
    heartbeats = scheduler.build_connector_meta(None).heartbeat_by_engine
    return {engine_id: set(info.req_ids) for engine_id, info in heartbeats.items()}


def test_a_handoff_is_kept_alive_from_the_requests_arrival_until_it_has_been_read() -> None:
    scheduler = _scheduler()
    scheduler.on_new_request(_request(HANDOFF))
    assert _beats(scheduler) == _beats(scheduler) == {"prefill": {"theirs"}}
    scheduler.update_connector_output(KVConnectorOutput(finished_recving={"mine"}))
    assert _beats(scheduler) == {}


def test_heartbeats_come_once_in_a_sixth_of_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pull_scheduler, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    scheduler = _scheduler(lease_s=60.0)
    scheduler.on_new_request(_request(HANDOFF))
    beaten = []
    for clock.now in (1000.0, 1009.9, 1010.0, 1019.9, 1020.0):
        beaten.append(bool(_beats(scheduler)))
    assert beaten == [True, False, True, False, True]


def test_a_request_that_is_aborted_before_it_was_scheduled_notifies_the_holder_and_reads_nothing() -> None:
    scheduler = _scheduler()
    request = _request(HANDOFF)
    scheduler.on_new_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.request_finished(request, ([],)) == (False, None)
    meta = scheduler.build_connector_meta(None)
    ordered = meta.reqs_to_recv["mine"]
    assert (list(ordered.local_block_ids), ordered.awaiting_kvs, ordered.remote.request_id) == ([], False, "theirs")
    assert meta.heartbeat_by_engine == {}


def test_a_claimed_read_has_no_heartbeats() -> None:
    scheduler = _scheduler()
    scheduler.on_new_request(_request({**HANDOFF, "do_remote_prefill": False, "do_remote_decode": True}))
    assert _beats(scheduler) == {}


def test_without_bidirectional_transfer_a_decode_engine_retains_nothing() -> None:
    options = EngineOptions(connector=False, bidirectional=False)
    config = config_of(options, rank=0, engine_id="decode")
    scheduler = PullConnectorScheduler(config, "decode", host="127.0.0.1", port=1)
    request = _request({"label": "of somebody"})
    request.status = RequestStatus.FINISHED_STOPPED
    assert scheduler.request_finished(request, ([1, 2],)) == (False, None)
