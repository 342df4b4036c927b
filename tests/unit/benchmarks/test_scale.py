"""The scale benchmark: its time, its accounts, and what it counts of a whole control plane in one thread."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from backhaul_common.errors import AbortedError
from backhaul_common.etcd import Absent, Get, Put, Unchanged, prefix_end
from benchmarks.scale.etcd import CountingEtcd
from benchmarks.scale.meter import OTHERS, Meter
from benchmarks.scale.play import Counts, play
from benchmarks.scale.report import document, problems
from benchmarks.scale.virtual import VirtualLoop


def in_virtual_time(work: Any) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.close()


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.fixture(scope="module")
def small() -> Counts:
    return play(1, 1, turns=30, seed="test")


@pytest.fixture(scope="module")
def large() -> Counts:
    return play(6, 10, turns=60, seed="test")


def test_an_hour_passes_in_no_time() -> None:
    async def work(loop: VirtualLoop) -> float:
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(1800))
        return loop.time()

    began = time.monotonic()
    assert in_virtual_time(work) == pytest.approx(3600)
    assert time.monotonic() - began < 60


def test_what_waits_for_ever_is_told() -> None:
    async def work(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(RuntimeError, match="never happens"):
        in_virtual_time(work)


def test_each_step_is_paid_for_by_the_account_that_it_belongs_to() -> None:
    meter = Meter()

    async def inner() -> str:
        await asyncio.sleep(1)
        busy(0.05)
        return "done"

    async def outer() -> str:
        busy(0.02)
        return await meter.within("inner", inner())

    async def work(loop: VirtualLoop) -> str:
        meter.pay_for_tasks(loop)
        with meter.paying("outer"):
            task = asyncio.ensure_future(outer())
        meter.reset()
        return await task

    assert in_virtual_time(work) == "done"
    assert meter.cpu_s["inner"] >= 0.05
    assert 0.02 <= meter.cpu_s["outer"] < meter.cpu_s["inner"]
    assert meter.account == OTHERS


async def test_etcd_answers_by_prefix_with_the_newest_first_and_counts_what_is_written() -> None:
    etcd = CountingEtcd()
    lease = await etcd.grant(10.0)
    for name in (b"/a/2", b"/a/1", b"/b/1"):
        assert (await etcd.txn([Absent(name)], [Put(name, b"value", lease.lease_id)])).succeeded
    found = await etcd.txn([], [Get(b"/a/", prefix_end(b"/a/"), 1, newest_first=True)])
    assert [kv.key for kv in found.reads[0]] == [b"/a/1"]
    assert not (await etcd.txn([Unchanged(b"/a/1", 1)], [Put(b"/a/1", b"other", 0)])).succeeded
    assert (etcd.written_bytes, etcd.stored_bytes) == (27, 27)
    await etcd.revoke(lease.lease_id)
    assert (await etcd.list_prefix(b"/")).items == ()
    with pytest.raises(AbortedError):
        await etcd.keep_alive_once(99)
    assert dict(etcd.requests) == {"lease": 3, "write": 3, "find": 2, "look": 1}


def test_a_turn_is_looked_up_once_and_published_once_whatever_the_size(small: Counts, large: Counts) -> None:
    for counts in (small, large):
        later = counts.turns - counts.misses["first_turn"]
        assert counts.failures == 0
        assert later <= counts.calls["FindBlockSets"] <= 1.2 * later, "a few wait for what was only just published"
        assert counts.turns <= counts.calls["PublishBlockSets"] <= 1.4 * counts.turns, "and sets are taken back"
        assert counts.etcd_requests["find"] == counts.calls["FindBlockSets"]
        assert counts.etcd_requests["write"] == pytest.approx(counts.calls["PublishBlockSets"], abs=4)


def test_later_turns_reuse_what_was_held(small: Counts, large: Counts) -> None:
    for counts in (small, large):
        assert counts.routes["append"] + counts.routes.get("warm", 0) > 0.8 * (
            counts.turns - counts.misses["first_turn"]
        )
        assert {"router", "planner", "registry", "agent", "agent, idle"} <= counts.cpu_s.keys()


def test_what_is_played_again_is_the_same(small: Counts) -> None:
    again = play(1, 1, turns=30, seed="test")
    assert replace(again, cpu_s={}) == replace(small, cpu_s={})


def test_a_turn_that_costs_more_on_a_large_cluster_is_told(small: Counts) -> None:
    cpu_s = {**small.cpu_s, "router": 3 * small.cpu_s["router"]}
    report = document({"1P1D": [small], "2P2D": [replace(small, cpu_s=cpu_s)]}, seed="", seconds=1.0)
    assert report["clusters"]["1P1D"]["ratios"]["by_turn"]["router_us"] == 1.0
    assert problems(report) == ["2P2D: router_us of a turn is 3.00 times that of the first cluster, not 2 at most"]
    failed = document({"1P1D": [replace(small, failures=2)]}, seed="", seconds=1.0)
    assert problems(failed) == ["1P1D: 2 turns failed"]
