"""Backhaul's own connector, unchanged, on simulated engines: it reports, proves, reads and fences."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backhaul_connector import engine as connectors_engine
from backhaul_connector import wire
from backhaul_simulator import pull_worker
from backhaul_simulator.engine import Engine
from backhaul_simulator.requests import LoadFailedError, Request
from tests.fakes.connector_agent import AgentConnection, FakeAgent
from tests.fakes.etcd_process import free_port
from tests.fakes.eventually import eventually
from tests.unit.simulator.engines import PREFILL, TURN, all_free, engines, prefill, run, truth

LABEL = {"scope": "scope", "keys": ["key"]}

_DEADLINE_S, _TOO_SLOW_S = 2.0, 0.25
"""Time enough for a read to start, and a pause per block with which its ten blocks take longer."""

_MEASURED_S = 0.05
"""Per block: meanwhile the connector measures the other engine's clock, without which it would fail the read."""


@asynccontextmanager
async def connected(path: Path, port: int, **options: Any) -> AsyncIterator[tuple[Engine, Engine, AgentConnection]]:
    """Runs a prefill and a decode engine; gives them and the decode engine's connection to its agent."""
    with FakeAgent(path) as agent:
        async with engines(port=port, connector=True, agent_socket=str(path), **options) as (p, d):
            connections = {}
            for _ in range(2):
                connection, hello, _ = await asyncio.to_thread(agent.welcome)
                connections[hello.engine_id] = connection
                assert hello.side_channel_port == port + hello.rank
                assert hello.engine_id == (p, d)[hello.rank].engine_id
            yield p, d, connections[d.engine_id]


async def _turn(
    p: Engine, d: Engine, agent: AgentConnection, prompt: Sequence[int] = TURN
) -> tuple[list[int], wire.BlockSetReport]:
    """Runs a labelled turn; returns its answer and what the agent heard of it."""
    handoff = await prefill(p, prompt)
    answer, last = await run(d, prompt, {**handoff, "backhaul": LABEL}, ignore_eos=True)
    assert last.kv_transfer_params is None, "no reply carries a handle"
    heard = await asyncio.to_thread(agent.receive_until, lambda message: isinstance(message, wire.Retained))
    assert isinstance(heard[-1], wire.Retained)
    return answer, heard[-1].set


def _claim(report: wire.BlockSetReport, deadline: float) -> dict[str, Any]:
    """Returns a claim's parameters, as the router sends them to a prefill engine."""
    proof = {
        "scope": report.scope,
        "identity": report.identity.hex(),
        "stride": report.stride,
        "spacing": report.spacing,
        "token_count": report.token_count,
        "anchors": report.anchors.hex(),
    }
    return {**report.params, **PREFILL, "remote_blocks_expiry_time": deadline, "backhaul": proof}


async def test_a_turn_is_reported_and_its_claim_is_read_and_freed(side_channel: int, tmp_path: Path) -> None:
    async with connected(tmp_path / "agent", side_channel) as (p, d, agent):
        answer, report = await _turn(p, d, agent)
        assert report.token_count == len(TURN) + len(answer) - 1
        await all_free(p)
        assert p.reset_prefix_cache()
        second = [*TURN, *answer, 5, 6, 7]
        handoff = await prefill(p, second, _claim(report, report.deadline), read_block_s=_MEASURED_S)
        verdict = handoff.pop("backhaul")
        assert (verdict["verified"], verdict["read"], verdict["spent"]) == (
            report.token_count,
            report.token_count,
            True,
        )
        again, _ = await run(d, second, {**handoff, "backhaul": LABEL}, ignore_eos=True)
        assert again == truth(second)
        freed = await asyncio.to_thread(agent.receive_until, lambda message: isinstance(message, wire.Freed))
        assert freed[-1] == wire.Freed(set_ids=[report.set_id])
        assert p.ledger()["reads"]["claimed"]["completed"] == 1
        assert d.ledger()["second_reads"] == d.ledger()["reads_of_freed"] == p.ledger()["wrong_reads_used"] == 0


async def test_an_edited_history_reads_only_what_is_proved(side_channel: int, tmp_path: Path) -> None:
    async with connected(tmp_path / "agent", side_channel) as (p, d, agent):
        answer, report = await _turn(p, d, agent)
        await all_free(p)
        assert p.reset_prefix_cache()
        edited = [*TURN[:200], 1, *TURN[201:], *answer, 5]
        handoff = await prefill(p, edited, _claim(report, report.deadline), read_block_s=_MEASURED_S)
        verdict = handoff.pop("backhaul")
        assert verdict["verified"] == verdict["read"] == 192
        again, _ = await run(d, edited, handoff, ignore_eos=True)
        assert again == truth(edited)


async def test_a_long_history_is_read_once_it_is_proved_and_the_engine_serves_others_meanwhile(
    side_channel: int, tmp_path: Path
) -> None:
    long = [number % 40_000 for number in range(25_000)]
    async with connected(tmp_path / "agent", side_channel, block_count=2_048) as (p, d, agent):
        answer, report = await _turn(p, d, agent, long)
        assert report.token_count == len(long) + len(answer) - 1
        await all_free(p)
        assert p.reset_prefix_cache()
        second = [*long, *answer, 5, 6, 7]
        warm = asyncio.create_task(prefill(p, second, _claim(report, report.deadline)))
        other, _ = await run(p, TURN, ignore_eos=True)
        assert other == truth(TURN)
        handoff = await warm
        assert handoff.pop("backhaul")["read"] == report.token_count
        again, _ = await run(d, second, handoff, ignore_eos=True)
        assert again == truth(second)


async def test_another_conversation_reads_nothing_and_costs_the_set_nothing(side_channel: int, tmp_path: Path) -> None:
    async with connected(tmp_path / "agent", side_channel) as (p, d, agent):
        _, report = await _turn(p, d, agent)
        handoff = await prefill(p, range(3000, 3300), _claim(report, report.deadline))
        assert handoff["backhaul"]["refused"] == "too_short"
        assert handoff["backhaul"]["spent"] is False
        assert d.ledger()["retained"]["claimed"]["sets"] == 1


async def test_a_claimed_read_that_ends_after_its_deadline_is_failed_and_not_cached(
    side_channel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(tmp_path / "agent", side_channel) as (p, d, agent):
        # vLLM starts no read within five seconds of its deadline; here only its end matters.
        monkeypatch.setattr(pull_worker, "_EXPIRY_SAFETY_MARGIN_S", 0.0)
        answer, report = await _turn(p, d, agent)
        await all_free(p)
        assert p.reset_prefix_cache()
        second = [*TURN, *answer, 5, 6, 7]
        claim = _claim(report, time.perf_counter() + _DEADLINE_S)
        late = Request(request_id="r", prompt=second, max_tokens=1, kv_transfer_params=claim, read_block_s=_TOO_SLOW_S)
        with pytest.raises(LoadFailedError):
            await anext(p.generate(late))
        assert p.ledger()["late_reads_failed"] == 1
        await all_free(p)
        _, last = await run(p, second)
        assert last.cached_tokens == 0


async def test_a_hand_off_says_until_when_its_blocks_are_certainly_kept(side_channel: int, tmp_path: Path) -> None:
    async with connected(tmp_path / "agent", side_channel, lease_s=20.0) as (p, d, agent):
        began = time.perf_counter()
        handoff = await prefill(p, TURN)
        told = handoff["remote_blocks_expiry_time"]
        assert began + 20.0 <= told <= time.perf_counter() + 20.0
        answer, last = await run(d, TURN, {**handoff, "backhaul": LABEL}, ignore_eos=True)
        assert (answer, last.cached_tokens) == (truth(TURN), len(TURN))
        # What the decode engine retains has a time of its own.
        heard = await asyncio.to_thread(agent.receive_until, lambda message: isinstance(message, wire.Retained))
        assert isinstance(heard[-1], wire.Retained)
        assert heard[-1].set.deadline > told + 100
        assert heard[-1].set.params["remote_blocks_expiry_time"] == heard[-1].set.deadline


async def test_a_hand_off_whose_lease_is_over_is_not_read(
    side_channel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connectors_engine, "MIN_LEASE_S", 0.0)
    async with connected(tmp_path / "agent", side_channel, lease_s=0.3) as (p, d, _):
        handoff = await prefill(p, TURN)
        await all_free(p)
        late = Request(request_id="r", prompt=TURN, max_tokens=8, kv_transfer_params={**handoff, "backhaul": LABEL})
        with pytest.raises(LoadFailedError):
            await anext(d.generate(late))
        assert p.ledger()["reads"]["handoff"]["served"] == p.ledger()["reads_of_freed"] == 0
        await all_free(d)
        answer, last = await run(d, TURN, ignore_eos=True)
        assert (answer, last.cached_tokens) == (truth(TURN), 0)


async def test_a_hand_off_whose_read_ends_after_its_lease_is_failed_and_not_cached(
    side_channel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(tmp_path / "agent", side_channel) as (p, d, _):
        # vLLM starts no read within five seconds of its deadline; here only its end matters.
        monkeypatch.setattr(pull_worker, "_EXPIRY_SAFETY_MARGIN_S", 0.0)
        handoff = {**await prefill(p, TURN), "remote_blocks_expiry_time": time.perf_counter() + _DEADLINE_S}
        late = Request(request_id="r", prompt=TURN, max_tokens=8, kv_transfer_params=handoff, read_block_s=_TOO_SLOW_S)
        with pytest.raises(LoadFailedError):
            await anext(d.generate(late))
        assert d.ledger()["late_reads_failed"] == 1
        await all_free(d)
        answer, last = await run(d, TURN, ignore_eos=True)
        assert (answer, last.cached_tokens) == (truth(TURN), 0)


async def test_a_hand_off_of_vllms_own_connector_has_no_deadline_and_is_read(side_channel: int, tmp_path: Path) -> None:
    async with (
        connected(tmp_path / "agent", side_channel) as (_, d, _),
        engines(1, port=free_port()) as (stock,),
    ):
        handoff = await prefill(stock, TURN)
        assert handoff["remote_blocks_expiry_time"] is None
        answer, last = await run(d, TURN, {**handoff, "backhaul": LABEL}, ignore_eos=True)
        assert (answer, last.cached_tokens) == (truth(TURN), len(TURN))


async def test_a_turn_without_prefill_elsewhere_is_leased_and_not_pinned(side_channel: int, tmp_path: Path) -> None:
    async with connected(tmp_path / "agent", side_channel, ttl_s=0.3) as (_, d, agent):
        await run(d, TURN, {"backhaul": LABEL}, ignore_eos=True)
        await eventually(lambda: d.ledger()["retained"]["claimed"]["leases"] == 1)
        heard = await asyncio.to_thread(agent.receive_until, lambda message: isinstance(message, wire.Freed))
        said = [type(message) for message in heard if not isinstance(message, wire.Identity | wire.Memory)]
        assert said == [wire.Retained, wire.Freed]
        await all_free(d)


async def test_a_turn_that_ends_by_its_stop_token_is_reported_without_the_token_still_in_flight(
    side_channel: int, tmp_path: Path
) -> None:
    async with connected(tmp_path / "agent", side_channel) as (p, d, agent):
        third = truth(TURN)[2]
        params = {**await prefill(p, TURN), "backhaul": LABEL}
        answer, last = await run(d, TURN, params, ignore_eos=True, stop_token_ids=frozenset([third]))
        assert (len(answer), last.finish_reason) == (3, "stop")
        heard = await asyncio.to_thread(agent.receive_until, lambda message: isinstance(message, wire.Retained))
        assert isinstance(heard[-1], wire.Retained)
        assert heard[-1].set.token_count == len(TURN) + 2
