"""Command line of the benchmark."""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from backhaul_local.judged import run_judged
from backhaul_local.progress import ConsoleSteps
from benchmarks.registry.report import document, problems, show
from benchmarks.registry.run import Plan, run
from benchmarks.routing.report import save


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.registry",
        description="Lookups, publications and claims, beside bare gRPC handlers that do the same to the same etcd.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--pointers", type=_count, nargs="+", default=[1_000, 100_000, 1_000_000], metavar="N", help="in etcd"
    )
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="times that each is measured")
    parser.add_argument(
        "--seconds", type=_count, default=2, metavar="S", help="of each operation of each arm, each time"
    )
    parser.add_argument("--sets", type=_count, default=10_000, metavar="N", help="of the agent that is claimed from")
    parser.add_argument("--turns-per-s", type=_count, default=40, metavar="N", help="of the node that is loaded")
    parser.add_argument(
        "--state", type=Path, default=Path(".state/bench-registry"), help="folder for data, logs and reports; on a disk"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    plan = Plan(
        pointer_counts=tuple(sorted(set(options.pointers))),
        rounds=options.rounds,
        seconds=options.seconds,
        set_count=options.sets,
        loaded_turns_per_s=options.turns_per_s,
    )
    state = options.state.resolve() / time.strftime("%Y%m%d-%H%M%S")
    began = time.monotonic()
    with ConsoleSteps(console) as steps:
        results = run(plan, state, steps)
    report = document(plan, results, seconds=time.monotonic() - began)
    save(report, state / "report.json")
    console.print(f"report: {state / 'report.json'}", soft_wrap=True)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when no target is missed."""
    return run_judged(partial(_run, _parser().parse_args(argv)), show=show, problems=problems)


if __name__ == "__main__":
    sys.exit(main())
