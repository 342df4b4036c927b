"""What a run has shown, for people and for machines."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.routing.machine import description
from benchmarks.scale.figures import figures_of, ratios, reuse_share
from benchmarks.scale.play import Counts

MOST: Mapping[str, float] = {
    "router_us": 2.0,
    "registry_us": 1.5,
    "agents_us": 1.5,
    "registry_calls": 1.2,
    "etcd_requests": 1.2,
    "etcd_written_bytes": 1.2,
}
"""By how many times a turn may cost more on a large cluster than with one engine pair."""


def document(results: Mapping[str, Sequence[Counts]], *, seed: str, seconds: float) -> dict[str, Any]:
    """Returns the report as JSON; ``results`` by cluster, the smallest first."""
    clusters: dict[str, Any] = {}
    first: dict[str, dict[str, float]] = {}
    for name, rounds in results.items():
        figures = figures_of(rounds)
        first = first or figures
        clusters[name] = {
            "turns": [counts.turns for counts in rounds],
            "turns_per_s": rounds[0].turns / rounds[0].virtual_s,
            "reuse_share": reuse_share(rounds[0]),
            "failures": sum(counts.failures for counts in rounds),
            **figures,
            "ratios": {kind: ratios(of_kind, first[kind]) for kind, of_kind in figures.items()},
            "counts": [asdict(counts) for counts in rounds],
        }
    return {
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": description(),
        "seed": seed,
        "seconds": round(seconds, 1),
        "clusters": clusters,
    }


def problems(report: Mapping[str, Any]) -> list[str]:
    """Returns what must not be in a report."""
    found = []
    for name, cluster in report["clusters"].items():
        if cluster["failures"]:
            found.append(f"{name}: {cluster['failures']} turns failed")
        grown = {figure: cluster["ratios"]["by_turn"][figure] for figure in MOST}
        found += [
            f"{name}: {figure} of a turn is {ratio:.2f} times that of the first cluster, not {MOST[figure]:g} at most"
            for figure, ratio in grown.items()
            if ratio > MOST[figure]
        ]
    return found


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints the figures."""
    console.print(f"seed {report['seed']}, {report['machine']}", highlight=False)
    console.print(_table(report, "by_turn", "What a turn costs"))
    console.print(_table(report, "by_node_second", "What a node costs each second, turns or none"))


def _table(report: Mapping[str, Any], kind: str, title: str) -> Table:
    clusters = report["clusters"]
    table = Table(title=f"{title} (times that of the first cluster)")
    table.add_column("")
    for name in clusters:
        table.add_column(name, justify="right")
    if kind == "by_turn":
        table.add_row("turns/s (virtual)", *(f"{each['turns_per_s']:.1f}" for each in clusters.values()))
        table.add_row("reused", *(f"{each['reuse_share']:.0%}" for each in clusters.values()))
    for figure in next(iter(clusters.values()))[kind]:
        table.add_row(
            figure.replace("_us", ", us of CPU").replace("_", " "),
            *(f"{each[kind][figure]:.4g} ({each['ratios'][kind][figure]:.2f})" for each in clusters.values()),
        )
    return table
