"""What a run has shown, for people and for machines."""

import json
import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.soak.keeper import CANCELLED_READ
from tests.soak.ledgers import FORBIDDEN, Ledgers
from tests.soak.tally import Tally


def document(
    tally: Tally,
    ledgers: Ledgers,
    *,
    settings: dict[str, Any],
    seconds: float,
    faults: list[str],
    missed_faults: list[str],
    deaths: list[str],
) -> dict[str, Any]:
    """Returns the whole report as JSON."""
    return {
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "settings": settings,
        "seconds": round(seconds, 1),
        "turns_per_s": round(tally.turn_count / seconds, 1),
        **tally.document(),
        "engines_counted": ledgers.counts(),
        "faults": faults,
        "faults_by_kind": dict(Counter(name.partition(" ")[0] for name in faults).most_common()),
        "missed_faults": missed_faults,
        "deaths": deaths,
        "engines": ledgers.ranks,
    }


def problems(report: dict[str, Any], *, faults_allowed: bool) -> list[str]:
    """Returns what must not be in a report."""
    found = []
    if report["wrong_texts"]:
        found.append(f"{report['wrong_texts']} wrong texts")
    for name in FORBIDDEN:
        if count := report["engines_counted"][name]:
            found.append(f"{count} {name.replace('_', ' ')}")
    if not report["faults"] and (count := report["engines_counted"]["reads_of_freed"]):
        # Where something is broken, a late read may meet freed blocks.
        found.append(f"{count} reads of freed blocks although nothing was broken")
    outcomes = dict(report["outcomes"])
    if hung := outcomes.get("hung"):
        found.append(f"{hung} turns hung")
    failed = {name: count for name, count in outcomes.items() if name not in ("answered", "left")}
    if failed and not faults_allowed:
        found.append(f"{sum(failed.values())} turns failed although nothing was broken: {failed}")
    # Connections that are broken on purpose cancel what is under way on them.
    deaths = [name for name in report["deaths"] if not (faults_allowed and name.endswith(CANCELLED_READ))]
    if deaths:
        found.append(f"processes died by themselves: {', '.join(deaths)}")
    if not report["routes"].get("warm"):
        found.append("no turn was warm: the run shows nothing")
    return found


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the counts."""
    table = Table(title=f"{report['turns']} turns in {report['seconds']:.0f} s, seed {report['settings']['seed']}")
    table.add_column("what")
    table.add_column("count", justify="right")
    for group in ("outcomes", "routes", "misses", "kinds", "engines_counted", "faults_by_kind"):
        for name, count in report[group].items():
            table.add_row(f"{group.replace('_', ' ')}: {name}", str(count))
    table.add_row("wrong texts", str(report["wrong_texts"]))
    table.add_row("faults", str(len(report["faults"])))
    table.add_row("faults that could not begin", str(len(report["missed_faults"])))
    console.print(table)


def save(report: dict[str, Any], path: Path) -> None:
    """Writes the report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
