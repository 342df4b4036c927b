"""Command line of the benchmark."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from backhaul_local.judged import run_judged
from backhaul_local.progress import ConsoleSteps
from benchmarks.agent.run import LEASE_S, PERIOD_S, Arm, Plan, Results, nixl_installed, run
from benchmarks.routing.machine import description
from benchmarks.routing.report import save

MOST_SHARE = 0.05
"""Of one core, however many sets an agent holds."""

_OTHERS = 0.2
"""Share of the cores that others may use before a run measures them."""
_FEW = 0.95
"""Share of the sets that must be there all the time."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agent",
        description="What a node agent costs that holds few and many block sets, beside one that holds none.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--sets", type=_count, nargs="+", default=[10, 1_000, 10_000], metavar="N", help="sets to hold")
    parser.add_argument("--rounds", type=_count, default=2, metavar="N", help="times that all are measured")
    parser.add_argument(
        "--seconds", type=_count, default=int(PERIOD_S), metavar="S", help="of each; by default each set's renewal once"
    )
    parser.add_argument(
        "--turns-per-s", type=_count, default=20, metavar="N", help="turns that end, where the budget is full"
    )
    parser.add_argument(
        "--state", type=Path, default=Path(".state/bench-agent"), help="folder for data, logs and reports"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def arms(set_counts: Sequence[int], turns_per_s: float, *, nixl: bool) -> list[Arm]:
    """Returns an idle one, one for each number of sets, and two more for the greatest: full, and by NIXL itself."""
    most = max(set_counts)
    made = [Arm(name="idle", set_count=0), *(Arm(name=f"{count:,}", set_count=count) for count in set_counts)]
    made.append(Arm(name=f"{most:,}, full", set_count=most, turns_per_s=turns_per_s))
    if nixl:
        made.append(Arm(name=f"{most:,}, NIXL", set_count=most, nixl=True))
    return made


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    nixl = nixl_installed()
    if not nixl:
        console.print("nixl is not installed: all agents speak through the simulator's stand-in")
    plan = Plan(
        arms=arms(options.sets, options.turns_per_s, nixl=nixl), rounds=options.rounds, seconds=float(options.seconds)
    )
    state = options.state.resolve() / time.strftime("%Y%m%d-%H%M%S")
    with ConsoleSteps(console) as steps:
        report = document(plan, run(plan, state, steps))
    save(report, state / "report.json")
    console.print(f"report: {state / 'report.json'}", soft_wrap=True)
    return report


def document(plan: Plan, results: Results) -> dict[str, Any]:
    """Returns the report as JSON."""
    return {
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": description(),
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "lease_s": LEASE_S,
        "machine_cpu_share": results.machine_cpu_share,
        "own_cpu_share": results.own_cpu_share,
        "arms": {arm.name: {"arm": asdict(arm), **asdict(results.arms[arm.name])} for arm in plan.arms},
    }


def _show(report: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"CPU time of one agent ({report['machine']})")
    table.add_column("sets", no_wrap=True)
    for column in ("renewed/s", "confirmed/s", "released/s", "% of core", "by round", "x idle"):
        table.add_column(column, justify="right")
    idle = fmean(report["arms"]["idle"]["cpu_share"])
    for name, arm in report["arms"].items():
        share = fmean(arm["cpu_share"])
        table.add_row(
            name,
            *(f"{fmean(arm[what]):.1f}" for what in ("renewals_per_s", "confirmed_per_s", "releases_per_s")),
            f"{100 * share:.2f}",
            ", ".join(f"{100 * one:.2f}" for one in arm["cpu_share"]),
            f"{share / idle:.1f}",
        )
    console.print(table)
    own, everything = (fmean(report[f"{whose}_cpu_share"]) for whose in ("own", "machine"))
    console.print(f"cores busy: {everything:.0%}, {own:.0%} of it with this benchmark", highlight=False)


def problems(report: Mapping[str, Any]) -> list[str]:
    """Returns what must not be in a report."""
    shares = zip(report["machine_cpu_share"], report["own_cpu_share"], strict=True)
    found = [f"others used {all_ - own:.0%} of the cores" for all_, own in shares if all_ - own > _OTHERS]
    for name, arm in report["arms"].items():
        share = fmean(arm["cpu_share"])
        if share > MOST_SHARE:
            found.append(f"{name}: {share:.1%} of a core, more than {MOST_SHARE:.0%}")
        wanted = arm["arm"]["set_count"]
        if min(arm["set_count"]) < _FEW * wanted:
            found.append(f"{name}: only {min(arm['set_count'])} of {wanted} sets were held")
        if arm["lost"]:
            found.append(f"{name}: {arm['lost']} notifications did not leave")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when no agent takes more than a twentieth of a core."""
    return run_judged(partial(_run, _parser().parse_args(argv)), show=_show, problems=problems)


if __name__ == "__main__":
    sys.exit(main())
