"""What a report of the registry's benchmark says, and which targets it finds missed."""

import json
from typing import Any

import pytest

from benchmarks.registry import disk
from benchmarks.registry.filled import Size
from benchmarks.registry.load import Timings, measure
from benchmarks.registry.node import Memory
from benchmarks.registry.report import document, problems
from benchmarks.registry.run import AGENT, ALONE, CLAIM, CROWD, FIND, IDLE, PLAIN, Plan, Results
from benchmarks.registry.sites import BARE

PLAN = Plan(pointer_counts=(1_000, 100_000), rounds=1, seconds=1.0, set_count=10, loaded_turns_per_s=1.0)


def timings(per_s: float, latency_s: float = 0.001) -> Timings:
    return Timings(latencies_s=[latency_s] * 100, rates=[per_s], cpu_s=0.02)


def report(
    *,
    registry_per_s: float = 900.0,
    claims_per_s: float = 900.0,
    among_many_s: float = 0.001,
    bytes_each: float = 320.0,
    found_s: float = 0.01,
) -> dict[str, Any]:
    results = Results()
    for pointers, latency_s in ((1_000, 0.001), (100_000, among_many_s)):
        for callers in (ALONE, CROWD):
            results.timings[FIND, pointers, BARE, callers] = timings(1000.0)
            results.timings[FIND, pointers, "1 registry", callers] = timings(registry_per_s, latency_s)
            results.timings[FIND, pointers, "3 registries", callers] = timings(100.0)
    results.timings[CLAIM, 10, BARE, CROWD] = timings(1000.0)
    results.timings[CLAIM, 10, AGENT, CROWD] = timings(claims_per_s)
    results.sizes[PLAIN] = Size(
        pointer_count=100_000, key_bytes=129, value_bytes=90, database_bytes=bytes_each, memory_bytes=1.0
    )
    results.findable[IDLE] = timings(0.0, found_s)
    results.memory = Memory(10, 1.0, 2.0)
    return document(PLAN, results, seconds=1.0)


def test_a_report_is_json_and_compares_each_arm_with_the_bare_handlers() -> None:
    made = report(registry_per_s=850.0)
    assert json.loads(json.dumps(made)) == json.loads(json.dumps(made, default=str))
    ratios = {(row["pointers"], row["arm"]): row["ratio"] for row in made["operations"] if row["operation"] == FIND}
    assert ratios[1_000, BARE] == 1.0
    assert ratios[1_000, "1 registry"] == 0.85
    assert made["operations"][0]["cpu_us"] == pytest.approx(200)


def test_what_meets_all_targets_has_no_problem() -> None:
    assert problems(report(registry_per_s=800.0, among_many_s=0.0012, bytes_each=400.0, found_s=0.02)) == []


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"registry_per_s": 790.0}, ["find at 1,000: 0.79 of", "find at 100,000: 0.79 of"]),
        ({"claims_per_s": 500.0}, ["claim at 10: 0.50 of"]),
        ({"among_many_s": 0.0013}, ["a lookup takes 1.30 times as long among 100,000"]),
        ({"bytes_each": 401.0}, ["a pointer (plain) takes 401 bytes"]),
        ({"found_s": 0.021}, ["idle: found 21.0 ms after"]),
    ],
)
def test_a_missed_target_is_a_problem(figures: dict[str, float], found: list[str]) -> None:
    told = problems(report(**figures))
    assert len(told) == len(found)
    assert all(text in problem for text, problem in zip(found, told, strict=True))


async def test_callers_call_again_as_soon_as_they_are_answered() -> None:
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1

    seen = Timings()
    await measure([call, call], 0.01, [], seen)
    assert len(seen.latencies_s) == calls > 2
    assert len(seen.rates) == 1


def test_quantiles_are_of_all_rounds() -> None:
    seen = Timings(latencies_s=[0.003, 0.001, 0.002])
    assert (seen.quantile_s(0.5), seen.quantile_s(0.99), seen.quantile_s(0.0)) == (0.002, 0.003, 0.001)


def test_what_etcd_waited_for_its_disk_is_what_it_counted_between_two_looks() -> None:
    name = "etcd_disk_wal_fsync_duration_seconds"
    pages = [
        f'# TYPE {name} histogram\n{name}_bucket{{le="0.001"}} {fast}\n{name}_bucket{{le="0.008"}} {all_}\n'
        f'{name}_bucket{{le="+Inf"}} {all_}\n{name}_sum 1\n{name}_count {all_}\n'
        for fast, all_ in ((100, 100), (150, 200))
    ]
    buckets = disk.since(*map(disk.buckets_in, pages))
    assert disk.quantile_s(buckets, 0.5) == 0.001
    assert disk.quantile_s(buckets, 0.99) == 0.008
    assert disk.quantile_s({}, 0.5) is None
