"""What a run has shown, for people and for machines."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from backhaul_router.core.turn import Route
from benchmarks.routing.arms import CHOSEN
from benchmarks.routing.figures import errors_of, figures_of, ratio_of
from benchmarks.routing.machine import description
from benchmarks.routing.run import Plan, Results, Seen

MOST_WORSE = 1.05
"""By how much the chosen routes may be worse than the best fixed policy, on any load."""

MIXED = "mixed"
"""The load on which they must be better than every fixed policy."""

_BUSY = 0.7
"""Share of the cores above which a run measures the machine."""


def document(plan: Plan, results: Results, *, seconds: float) -> dict[str, Any]:
    """Returns the report as JSON, of the loads that all arms have played."""
    played = [load for load in plan.loads if all(results[load, arm.name].turns for arm in plan.arms)]
    return {
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": description(),
        "seed": plan.seed,
        "rounds": plan.rounds,
        "duration_s": plan.duration_s,
        "seconds": round(seconds, 1),
        "loads": {load: _load(plan, results, load) for load in played},
    }


def _load(plan: Plan, results: Results, load: str) -> dict[str, Any]:
    seen = {arm.name: results[load, arm.name] for arm in plan.arms}
    arms = {name: _arm(of_arm) for name, of_arm in seen.items()}
    fixed = [name for name in arms if name != CHOSEN]
    if CHOSEN not in arms or not fixed:
        return {"arms": arms}
    best = min(fixed, key=lambda name: arms[name]["mean_ttft_s"])
    ratios = {name: asdict(ratio_of(seen[CHOSEN].turns, seen[name].turns, seed=load)) for name in fixed}
    return {"arms": arms, "best_fixed": best, "ratios": ratios}


def _arm(seen: Seen) -> dict[str, Any]:
    own, all_of_it = (fmean(shares) for shares in zip(*seen.cpu, strict=True))
    return {
        **asdict(figures_of(seen.turns)),
        "estimate_errors": asdict(errors_of(seen.estimates)) if seen.estimates else None,
        "failures": dict(Counter(seen.failures).most_common()),
        "wrong_texts": seen.wrong_count,
        "cpu_share": own,
        "machine_cpu_share": all_of_it,
    }


def problems(report: Mapping[str, Any]) -> list[str]:
    """Returns what must not be in a report."""
    found = []
    for load, of_load in report["loads"].items():
        for arm, figures in of_load["arms"].items():
            found += [f"{load}, {arm}: {count} turns failed: {why}" for why, count in figures["failures"].items()]
            if figures["wrong_texts"]:
                found.append(f"{load}, {arm}: {figures['wrong_texts']} wrong texts")
            if figures["machine_cpu_share"] > _BUSY:
                found.append(f"{load}, {arm}: {figures['machine_cpu_share']:.0%} of the cores were busy")
        found += _worse(load, of_load.get("ratios", {}))
    return found


def _worse(load: str, ratios: Mapping[str, Mapping[str, float]]) -> list[str]:
    bound = 1.0 if load == MIXED else MOST_WORSE
    return [
        f"{load}: {ratio['value']:.3f} times the time of always {name}"
        for name, ratio in ratios.items()
        if ratio["value"] > bound
    ]


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints the figures."""
    console.print(f"seed {report['seed']}, {report['machine']}", highlight=False)
    console.print(_times(report["loads"]))
    console.print(_choices(report["loads"]))


def _times(loads: Mapping[str, Any]) -> Table:
    names = list(next(iter(loads.values()))["arms"])
    table = _table("Mean time to first token, ms", "load", "turns", *names, "ratio", "95 %")
    for load, of_load in loads.items():
        arms = of_load["arms"]
        ratio = of_load["ratios"][of_load["best_fixed"]] if "ratios" in of_load else None
        table.add_row(
            load,
            str(arms[names[0]]["turn_count"]),
            *(f"{1000 * arms[name]['mean_ttft_s']:.0f}" for name in names),
            f"{ratio['value']:.2f}" if ratio else "-",
            f"{ratio['low']:.2f}-{ratio['high']:.2f}" if ratio else "-",
        )
    return table


def _choices(loads: Mapping[str, Any]) -> Table:
    """Of the chosen routes; where they were not played, of the first arm."""
    table = _table("What was chosen", "load", *(route.value for route in Route), "estimates off by, ms", "cores busy")
    for load, of_load in loads.items():
        arms = of_load["arms"]
        chosen = arms.get(CHOSEN) or next(iter(arms.values()))
        table.add_row(
            load,
            *(f"{chosen['routes'].get(route.value, 0.0):.0%}" for route in Route),
            _off_by(chosen["estimate_errors"]),
            f"{max(arm['machine_cpu_share'] for arm in arms.values()):.0%}",
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def _off_by(errors: Mapping[str, float] | None) -> str:
    return f"{1000 * errors['mean_absolute_s']:.0f} ({1000 * errors['mean_s']:+.0f})" if errors else "-"


def save(report: Mapping[str, Any], path: Path) -> None:
    """Writes the report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
