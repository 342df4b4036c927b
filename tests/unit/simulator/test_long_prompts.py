"""Backhaul's connector digests long prompts bit by bit, whatever becomes of their requests meanwhile."""

import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from backhaul_connector import clocks, wire
from backhaul_connector.anchors import AnchorChain, Anchors, verified_count
from backhaul_connector.digesting import TOKENS_AHEAD, TOKENS_PER_STEP
from backhaul_simulator.connector_base import KVCacheBlocks, KVConnectorOutput, KVConnectorRole
from backhaul_simulator.engine_request import EngineRequest, RequestStatus
from backhaul_simulator.options import EngineOptions
from backhaul_simulator.pool import BlockPool
from backhaul_simulator.requests import Request
from backhaul_simulator.scheduler import Step
from backhaul_simulator.vllm_config import cache_config_of, config_of
from tests.fakes.block_sets import handle
from tests.fakes.eventually import eventually

LONG = [*range(40_000)]
LABEL = {"scope": "scope", "keys": ["key"]}
ENOUGH = 20
"""Steps in which everything is digested."""
BLOCKS: tuple[list[int], ...] = ([*range(1_250)],)


class Scheduler:
    """Calls the hooks of Backhaul's connector as a scheduler does, and counts what a step digests."""

    def __init__(self, side_channel: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import backhaul_connector

        options = EngineOptions(agent_socket=str(path / "agent"), side_channel_port=side_channel)
        config, cache = config_of(options, rank=0, engine_id="engine"), cache_config_of(options)
        self.connector: Any = backhaul_connector.NixlConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.digested = 0
        """Tokens digested since the last step."""
        self._pool = BlockPool(block_count=16, block_size=32)
        self._names = itertools.count()
        extend = AnchorChain.extend

        def counted(chain: AnchorChain, tokens: Sequence[int]) -> None:
            self.digested += len(tokens)
            extend(chain, tokens)

        monkeypatch.setattr(AnchorChain, "extend", counted)

    @property
    def side(self) -> Any:
        """The connector's state."""
        return self.connector._scheduler

    def reports(self) -> list[wire.BlockSetReport]:
        """Returns what an agent would be told now."""
        return [message.set for message in self.side._ledger.connect() if isinstance(message, wire.Retained)]

    def arrive(self, prompt: Sequence[int], params: dict[str, Any]) -> EngineRequest:
        """Takes a request."""
        name = f"request-{next(self._names)}"
        asked = Request(request_id=name, prompt=[*prompt], kv_transfer_params=params)
        request = EngineRequest(asked, request_id=name, max_tokens=100, block_size=32)
        self.connector.on_new_request(request)
        return request

    def step(self) -> tuple[Any, int]:
        """Plans a step; returns what the worker is told, and the tokens digested since the step before."""
        metadata = self.connector.build_connector_meta(Step())
        digested, self.digested = self.digested, 0
        return metadata, digested

    def matched(self, request: EngineRequest) -> tuple[int | None, bool]:
        """Asks what can be read."""
        found: tuple[int | None, bool] = self.connector.get_num_new_matched_tokens(request, 0)
        return found

    def allocate(self, request: EngineRequest, external: int) -> None:
        """Gives a request its blocks."""
        self.connector.update_state_after_alloc(request, KVCacheBlocks(self._pool, [1, 2]), external)

    def finish(self, request: EngineRequest, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
        """Ends a request, of which all but the last token is computed."""
        request.status, request.num_computed_tokens = status, request.num_tokens - 1
        return self.connector.request_finished_all_groups(request, BLOCKS)

    def output(self, **output: Any) -> None:
        """Tells what the worker said."""
        self.connector.update_connector_output(KVConnectorOutput(**output))


@pytest.fixture
async def scheduler(side_channel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scheduler]:
    # Nobody tells the time at the other engine's port.
    monkeypatch.setattr(clocks, "_TIMEOUT_MS", 1)
    made = Scheduler(side_channel, tmp_path, monkeypatch)
    await eventually(lambda: made.side._digests.get("") is not None)
    yield made
    made.connector.shutdown()


def covers(report: wire.BlockSetReport, tokens: Sequence[int]) -> int:
    """Returns how many tokens a report proves."""
    anchors = Anchors(report.identity, report.stride, report.spacing, report.token_count, report.anchors)
    return verified_count(anchors, tokens)


def claim_of(scheduler: Scheduler) -> dict[str, Any]:
    """Returns a claim of what a turn with the long prompt left at an engine like this one."""
    turn = scheduler.arrive(LONG, {"backhaul": LABEL})
    scheduler.allocate(turn, 0)
    scheduler.finish(turn)
    for _ in range(ENOUGH):
        scheduler.step()
    [report] = scheduler.reports()
    again = {"do_remote_prefill": False, "do_remote_decode": True, "remote_engine_id": "another"}
    return handle(report, **again, remote_request_id="set")


async def test_a_turn_is_digested_while_it_runs_a_little_per_step_and_each_token_once(scheduler: Scheduler) -> None:
    turn = scheduler.arrive(LONG, {"backhaul": LABEL})
    scheduler.allocate(turn, 0)
    assert scheduler.digested == 0
    digested = []
    for token in range(100):
        digested.append(scheduler.step()[1])
        turn.all_token_ids.append(token)

    assert max(digested) <= TOKENS_AHEAD
    assert scheduler.finish(turn) == (True, None)
    assert scheduler.digested < 100
    assert sum(digested) + scheduler.digested == len(LONG) + 99
    [report] = scheduler.reports()
    assert covers(report, turn.all_token_ids) == report.token_count == len(LONG) + 99


async def test_what_turns_left_at_their_end_is_digested_and_reported_in_the_next_steps(scheduler: Scheduler) -> None:
    turns = [scheduler.arrive(LONG, {"backhaul": LABEL}) for _ in range(4)]
    for turn in turns:
        scheduler.allocate(turn, 0)
        scheduler.finish(turn)
    digested, reported = [], []
    for _ in range(ENOUGH):
        digested.append(scheduler.step()[1])
        reported.append(len(scheduler.reports()))

    assert max(digested) <= TOKENS_PER_STEP
    assert sum(digested) == 4 * (len(LONG) - 1)
    assert reported == sorted(reported)
    assert reported[-1] == 4
    assert all(covers(report, LONG) == len(LONG) - 1 for report in scheduler.reports())


async def test_what_is_freed_before_it_could_be_reported_is_not_reported(scheduler: Scheduler) -> None:
    turn = scheduler.arrive(LONG, {"backhaul": LABEL})
    scheduler.allocate(turn, 0)
    scheduler.finish(turn)
    scheduler.output(finished_sending={turn.request_id})
    for _ in range(ENOUGH):
        scheduler.step()

    assert scheduler.reports() == []


async def test_a_deadline_that_moves_before_the_report_is_reported_as_it_is(scheduler: Scheduler) -> None:
    from backhaul_connector.snapshot import LeaseSnapshot

    turn = scheduler.arrive(LONG, {"backhaul": LABEL})
    scheduler.allocate(turn, 0)
    scheduler.finish(turn)
    scheduler.output(kv_connector_worker_meta=LeaseSnapshot({0: {turn.request_id: 5.0}}))
    for _ in range(ENOUGH):
        scheduler.step()

    assert [report.deadline for report in scheduler.reports()] == [5.0]


async def test_a_long_handle_is_proved_over_steps_and_the_request_asked_for_again(scheduler: Scheduler) -> None:
    claim = claim_of(scheduler)
    request = scheduler.arrive([*LONG, 1, 2], claim)
    answers: list[tuple[int | None, bool]] = []
    digested = []
    while not answers or answers[-1][0] is None:
        answers.append(scheduler.matched(request))
        digested.append(scheduler.step()[1])
        assert len(answers) < 10

    steps = -(-len(LONG) // TOKENS_PER_STEP)
    assert answers == [(None, False)] * (steps - 1) + [(len(LONG) - 1, True)]
    assert max(digested) <= TOKENS_PER_STEP
    assert sum(digested) == len(LONG) - 1
    scheduler.allocate(request, len(LONG) - 1)
    metadata, _ = scheduler.step()
    assert [*metadata.reqs_to_recv] == [request.request_id]
    _, params = scheduler.finish(request)
    assert (params["backhaul"]["verified"], params["backhaul"]["spent"]) == (len(LONG) - 1, True)


async def test_a_request_that_leaves_before_its_handle_is_proved_does_not_touch_the_set(scheduler: Scheduler) -> None:
    claim = claim_of(scheduler)
    # Such a flag makes vLLM notify the decode engine of a request that is aborted.
    request = scheduler.arrive([*LONG, 1, 2], {**claim, "do_remote_prefill": True})
    scheduler.finish(request, RequestStatus.FINISHED_ABORTED)
    for _ in range(ENOUGH):
        metadata, _ = scheduler.step()
        assert metadata.reqs_to_recv == {}

    again = scheduler.arrive([*LONG, 1, 2], claim)
    for _ in range(ENOUGH):
        scheduler.step()
    assert scheduler.matched(again) == (len(LONG) - 1, True)


async def test_a_request_that_runs_before_its_handle_is_proved_never_reads(scheduler: Scheduler) -> None:
    claim = claim_of(scheduler)
    request = scheduler.arrive([*LONG, 1, 2], claim)
    scheduler.allocate(request, 0)
    for _ in range(ENOUGH):
        metadata, _ = scheduler.step()
        assert metadata.reqs_to_recv == {}

    # As after a preemption.
    assert scheduler.matched(request) == (0, False)
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params["remote_block_ids"] is None
    _, params = scheduler.finish(request)
    verdict = params["backhaul"]
    assert (verdict["refused"], verdict["verified"], verdict["spent"]) == ("unproved", 0, False)


async def test_of_two_requests_with_one_handle_only_the_first_to_come_may_read(scheduler: Scheduler) -> None:
    claim = claim_of(scheduler)
    first, second = scheduler.arrive([*LONG, 1, 2], claim), scheduler.arrive([*LONG, 3], claim)
    for _ in range(ENOUGH):
        scheduler.step()

    assert scheduler.matched(first) == (len(LONG) - 1, True)
    assert scheduler.matched(second) == (0, False)
    _, params = scheduler.finish(second)
    assert (params["backhaul"]["refused"], params["backhaul"]["spent"]) == ("used", True)
