"""What the windows of the overhead benchmark come to, and what its report says of them."""

from typing import Any

import pytest
from rich.console import Console

from benchmarks.overhead.figures import figures_of, quantile, ratio
from benchmarks.overhead.play import Seen
from benchmarks.overhead.report import document, problems, show
from benchmarks.overhead.run import ARMS, LONG, PLAIN, SHORT, Plan, Results

IDLE = {"router": 0.01}


def seen(*, first_s: float = 0.003, router_s: float = 0.12, **fields: Any) -> Seen:
    """A window of 2 s with 100 turns."""
    cpu_s = {"router": router_s, "envoy": 0.3, "vllm-router": 0.05, "plain-envoy": 0.02}
    return Seen(seconds=2.0, count=100, times_s=[first_s] * 100, cpu_s=cpu_s, **fields)


def test_added_is_what_a_way_takes_more_than_none_in_the_same_round() -> None:
    rounds = [seen(first_s=0.003), seen(first_s=0.013), seen(first_s=0.004)]
    direct = [seen(first_s=0.001), seen(first_s=0.010), seen(first_s=0.001)]
    assert figures_of(rounds, direct, ["router"], IDLE).added_s == pytest.approx(0.003)


def test_what_a_process_does_anyhow_is_nobodys_cost() -> None:
    figures = figures_of([seen()], [seen()], ["router"], IDLE)
    assert figures.cpu_s == pytest.approx((0.12 - 2 * 0.01) / 100)
    assert figures.per_core_s == pytest.approx(1000)


def test_all_processes_on_the_way_count() -> None:
    assert figures_of([seen()], [seen()], ["router", "envoy"], {}).cpu_s == pytest.approx(0.42 / 100)


def test_who_sends_both_legs_itself_costs_no_core_anything() -> None:
    assert figures_of([seen()], [seen()], [], IDLE).per_core_s == 0.0


def test_quantiles_of_nothing_are_nothing() -> None:
    assert [quantile([], 0.5), quantile([3.0, 1.0, 2.0], 0.5), quantile([3.0, 1.0], 0.99)] == [0.0, 2.0, 3.0]
    assert ratio(1.0, 0.0) is None


@pytest.mark.parametrize(("streams", "gap_s"), [(1, 0.002), (8, 0.002), (256, 0.064)])
def test_streams_share_the_events_of_a_second_but_none_sends_faster_than_engines_do(streams: int, gap_s: float) -> None:
    assert plan().gap_s(streams) == pytest.approx(gap_s)


def test_a_report_compares_each_way_with_vllm_router_and_envoy() -> None:
    windows = {(load, arm, 8): [seen()] for load in (SHORT, LONG) for arm in ARMS}
    report = document(plan(), Results({}, windows), busy=0.1)
    http = report["loads"][LONG]["http"]["8"]
    assert http["of_vllm_router"]["per_core"] == pytest.approx(0.05 / 0.12)
    assert report["loads"][LONG]["envoy"]["8"]["of_plain_envoy"]["per_core"] == pytest.approx(0.02 / 0.42)
    assert problems(report) == []
    console = Console(record=True, width=200)
    show(report, console)
    assert "0.42x" in console.export_text()


def test_turns_that_failed_are_told() -> None:
    windows = {(SHORT, "direct", 8): [seen()], (SHORT, "http", 8): [seen(failures=["503 no", "503 no"])]}
    report = document(plan(arms=["direct", "http"]), Results({}, windows), busy=0.0)
    assert problems(report) == ["short, http, 8 streams: 503 no"]


def test_without_vllm_router_there_is_nothing_to_compare_with() -> None:
    windows = {(SHORT, "direct", 8): [seen()], (SHORT, "http", 8): [seen()]}
    report = document(plan(arms=["direct", "http"]), Results({}, windows), busy=0.0)
    assert report["loads"][SHORT]["http"]["8"]["of_vllm_router"] is None


def plan(**fields: Any) -> Plan:
    """A plan of 8 streams."""
    defaults: dict[str, Any] = {"arms": [*ARMS], "rounds": 1, "seconds": 2.0, "tokens": 16, "events_per_s": 4000}
    return Plan(**{**defaults, "streams": [8], **fields})


def test_plain_envoy_is_compared_by_its_events_only() -> None:
    windows = {(load, arm, 8): [seen()] for load in (SHORT, LONG) for arm in ARMS}
    report = document(plan(), Results({}, windows), busy=0.0)
    assert report["loads"][SHORT]["envoy"]["8"]["of_plain_envoy"] is None
    assert report["loads"][LONG][PLAIN]["8"]["of_plain_envoy"]["per_core"] == pytest.approx(1.0)
