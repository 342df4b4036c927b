"""The report: as JSON, and as tables."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.overhead.figures import Figures, figures_of, ratio
from benchmarks.overhead.run import ARMS, DIRECT, LONG, PEER, PLAIN, SHORT, Plan, Results
from benchmarks.routing.machine import description

_TITLES = {SHORT: "Turns of {tokens} tokens, one after the other", LONG: "Events of long streams"}
_FIRST = {SHORT: "first byte", LONG: "delay"}


def document(plan: Plan, results: Results, *, busy: float) -> dict[str, Any]:
    """Returns the report; ``busy`` is what else the machine did meanwhile, as a share of its cores."""
    rows = {
        load: {
            arm: {str(streams): _figures(results, load, arm, streams) for streams in plan.streams}
            for arm in plan.arms
            if (load, arm, plan.streams[0]) in results.seen
        }
        for load in (SHORT, LONG)
    }
    return {
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": description(),
        "busy_with_other_things": busy,
        "plan": asdict(plan),
        "idle_cpu_s_per_s": dict(results.idle),
        "loads": rows,
    }


def _figures(results: Results, load: str, arm: str, streams: int) -> dict[str, Any]:
    rounds, direct = results.seen[load, arm, streams], results.seen[load, DIRECT, streams]
    figures = figures_of(rounds, direct, ARMS[arm], results.idle)
    of_peer = _of(figures, results, load, PEER, streams)
    return {
        **asdict(figures),
        "per_core_s": figures.per_core_s,
        "of_vllm_router": of_peer,
        "of_plain_envoy": _of(figures, results, load, PLAIN, streams) if load == LONG else None,
    }


def _of(figures: Figures, results: Results, load: str, other: str, streams: int) -> dict[str, float | None] | None:
    """Returns an arm's figures as multiples of another one's; None where that was not played."""
    if (load, other, streams) not in results.seen:
        return None
    rounds, direct = results.seen[load, other, streams], results.seen[load, DIRECT, streams]
    than = figures_of(rounds, direct, ARMS[other], results.idle)
    return {
        "added": ratio(figures.added_s, than.added_s),
        "per_s": ratio(figures.per_s, than.per_s),
        "per_core": ratio(figures.per_core_s, than.per_core_s),
    }


def problems(report: Mapping[str, Any]) -> list[str]:
    """Returns what must not be in a report."""
    found = []
    for load, arms in report["loads"].items():
        for arm, by_streams in arms.items():
            for streams, figures in by_streams.items():
                found += [f"{load}, {arm}, {streams} streams: {failure}" for failure in figures["failures"]]
    return found


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints the tables."""
    console.print(f"{report['machine']}; {report['busy_with_other_things']:.0%} of the cores did other things")
    for load, arms in report["loads"].items():
        console.print(_table(load, arms, report["plan"]))


def _table(load: str, arms: Mapping[str, Any], plan: Mapping[str, Any]) -> Table:
    table = Table(title=_TITLES[load].format(tokens=plan["tokens"]))
    table.add_column("streams", justify="right")
    table.add_column("way")
    names = f"{_FIRST[load]} p50, ms", "p99", "added", "of vllm-router", "per s", "CPU us each", "per core s"
    for name in (*names, "of vllm-router", *(("of plain Envoy",) if load == LONG else ())):
        table.add_column(name, justify="right")
    for streams in map(str, plan["streams"]):
        for arm, by_streams in arms.items():
            table.add_row(streams, arm, *_cells(by_streams[streams], load))
        table.add_section()
    return table


def _cells(figures: Mapping[str, Any], load: str) -> list[str]:
    of_peer, of_plain = figures["of_vllm_router"] or {}, figures["of_plain_envoy"] or {}
    cells = [
        f"{1e3 * figures['p50_s']:.2f}",
        f"{1e3 * figures['p99_s']:.2f}",
        f"{1e3 * figures['added_s']:.2f}",
        _times(of_peer.get("added")),
        f"{figures['per_s']:,.0f}",
        f"{1e6 * figures['cpu_s']:,.1f}" if figures["cpu_s"] else "-",
        f"{figures['per_core_s']:,.0f}" if figures["cpu_s"] else "-",
        _times(of_peer.get("per_core")),
    ]
    return [*cells, _times(of_plain.get("per_core"))] if load == LONG else cells


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
