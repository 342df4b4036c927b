"""What a run has shown, for people and for machines, and which targets it misses."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.registry import disk
from benchmarks.registry.load import Timings
from benchmarks.registry.run import AGENT, ALONE, FIND, Plan, Results
from benchmarks.registry.sites import BARE
from benchmarks.routing.machine import description

LEAST_RATIO = 0.8
"""Operations per second of a registry or an agent, over those of a bare handler that does the same to etcd."""
MOST_GROWTH = 1.2
"""Median time of a lookup among the most pointers, over that among the fewest."""
MOST_BYTES = 400
"""Of a pointer in etcd."""
MOST_FINDABLE_S = 0.020
"""From the last token to the pointer, of 99 turns in 100."""

_SINGLE = ("1 registry", AGENT)
"""Arms of one process, as the bare handlers are."""


def document(plan: Plan, results: Results, *, seconds: float) -> dict[str, Any]:
    """Returns the report as JSON."""
    operations = [
        {"operation": operation, "pointers": pointers, "arm": arm, "callers": callers, **_figures(timings)}
        for (operation, pointers, arm, callers), timings in results.timings.items()
    ]
    rates = {_place(row): row["per_s"] for row in operations if row["arm"] == BARE}
    for row in operations:
        row["ratio"] = row["per_s"] / rates[_place(row)]
    return {
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": description(),
        "plan": asdict(plan),
        "seconds": round(seconds, 1),
        "operations": operations,
        "sizes": {kind: asdict(size) for kind, size in results.sizes.items()},
        "findable": {
            load: {**_latencies(timings), **_fsyncs(results.fsyncs[load])} for load, timings in results.findable.items()
        },
        "memory": asdict(results.memory) if results.memory else None,
    }


def _place(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["operation"], row["pointers"], row["callers"]


def _figures(timings: Timings) -> dict[str, Any]:
    rates = timings.rates
    return {"per_s": sum(rates) / len(rates), "rates": rates, **_latencies(timings), "cpu_us": timings.cpu_us}


def _latencies(timings: Timings) -> dict[str, float]:
    return {
        "count": len(timings.latencies_s),
        "p50_s": timings.quantile_s(0.5),
        "p99_s": timings.quantile_s(0.99),
    }


def _fsyncs(buckets: disk.Buckets) -> dict[str, float | None]:
    return {f"fsync_p{round(100 * share)}_s": disk.quantile_s(buckets, share) for share in (0.5, 0.99)}


def problems(report: Mapping[str, Any]) -> list[str]:
    """Returns the targets that are missed."""
    return [*_slow(report), *_growing(report), *_large(report), *_late(report)]


def _slow(report: Mapping[str, Any]) -> Iterator[str]:
    for row in report["operations"]:
        if row["arm"] in _SINGLE and row["callers"] != ALONE and row["ratio"] < LEAST_RATIO:
            yield (
                f"{row['operation']} at {row['pointers']:,}: {row['ratio']:.2f} of the bare handler's per second, "
                f"not {LEAST_RATIO}"
            )


def _growing(report: Mapping[str, Any]) -> Iterator[str]:
    medians = {
        row["pointers"]: row["p50_s"]
        for row in report["operations"]
        if (row["operation"], row["arm"], row["callers"]) == (FIND, _SINGLE[0], ALONE)
    }
    growth = medians[max(medians)] / medians[min(medians)]
    if growth > MOST_GROWTH:
        yield f"a lookup takes {growth:.2f} times as long among {max(medians):,} pointers, not {MOST_GROWTH}"


def _large(report: Mapping[str, Any]) -> Iterator[str]:
    for kind, size in report["sizes"].items():
        if size["database_bytes"] > MOST_BYTES:
            yield f"a pointer ({kind}) takes {size['database_bytes']:.0f} bytes in etcd, not {MOST_BYTES}"


def _late(report: Mapping[str, Any]) -> Iterator[str]:
    for load, figures in report["findable"].items():
        if figures["p99_s"] > MOST_FINDABLE_S:
            yield f"{load}: found {1e3 * figures['p99_s']:.1f} ms after the last token, not {1e3 * MOST_FINDABLE_S:.0f}"


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints the figures."""
    console.print(f"{report['machine']}, {report['seconds']:.0f} s", highlight=False)
    for table in (_operations(report), _sizes(report), _findable(report)):
        console.print(table)
    if memory := report["memory"]:
        agent, registry = memory["agent_bytes"], memory["registry_bytes"]
        console.print(
            f"{memory['set_count']:,} sets: {agent:,.0f} bytes each in the agent, {registry:,.0f} in the registry that "
            "their stream goes through",
            highlight=False,
        )


def _operations(report: Mapping[str, Any]) -> Table:
    table = _table(
        "Operations",
        "operation",
        "pointers",
        "callers",
        "arm",
        "per second",
        "of bare",
        "p50, ms",
        "p99, ms",
        "CPU, us",
    )
    for row in sorted(report["operations"], key=lambda row: (row["operation"], row["callers"], row["pointers"])):
        table.add_row(
            row["operation"],
            f"{row['pointers']:,}",
            str(row["callers"]),
            row["arm"],
            f"{row['per_s']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{1e3 * row['p50_s']:.2f}",
            f"{1e3 * row['p99_s']:.2f}",
            f"{row['cpu_us']:.0f}",
        )
    return table


def _sizes(report: Mapping[str, Any]) -> Table:
    table = _table("A pointer in etcd, bytes", "kind", "pointers", "key", "value", "database in use", "memory")
    for kind, size in report["sizes"].items():
        exact = (size["key_bytes"], size["value_bytes"], size["database_bytes"], size["memory_bytes"])
        table.add_row(kind, f"{size['pointer_count']:,}", *(f"{bytes_:.0f}" for bytes_ in exact))
    return table


def _findable(report: Mapping[str, Any]) -> Table:
    table = _table(
        "From the last token to the pointer", "load", "turns", "p50, ms", "p99, ms", "an fsync of etcd's, p50", "p99"
    )
    for load, figures in report["findable"].items():
        times = (f"{1e3 * figures[name]:.1f}" for name in ("p50_s", "p99_s"))
        fsyncs = (_at_most(figures[name]) for name in ("fsync_p50_s", "fsync_p99_s"))
        table.add_row(load, str(figures["count"]), *times, *fsyncs)
    return table


def _at_most(time_s: float | None) -> str:
    return "" if time_s is None else f"≤ {1e3 * time_s:.0f}"


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table
