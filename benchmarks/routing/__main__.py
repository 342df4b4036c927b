"""Command line of the benchmark."""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console

from backhaul_local.judged import run_judged
from backhaul_local.progress import ConsoleSteps
from benchmarks.routing.arms import ARMS
from benchmarks.routing.loads import LOADS
from benchmarks.routing.report import document, problems, save, show
from benchmarks.routing.run import Plan, Results, run

_ARMS = {arm.name: arm for arm in ARMS}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing",
        description="Seeded loads against a stack of simulated engines: chosen routes, and always the same one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="what all that is random comes from")
    parser.add_argument("--rounds", type=_count, default=1, metavar="N", help="times that each arm plays each load")
    parser.add_argument(
        "--duration-s", type=_seconds, default=10.0, metavar="S", help="for how long conversations arrive, each time"
    )
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS], metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--arms", nargs="+", choices=_ARMS, default=[*_ARMS], metavar="ARM", help=", ".join(_ARMS))
    parser.add_argument(
        "--state", type=Path, default=Path(".state/bench-routing"), help="folder for data, logs and reports"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return seconds


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    plan = Plan(
        seed=options.seed,
        loads=tuple(options.loads),
        arms=tuple(_ARMS[name] for name in options.arms),
        rounds=options.rounds,
        duration_s=options.duration_s,
    )
    state = options.state.resolve() / f"{time.strftime('%Y%m%d-%H%M%S')}-{options.seed}"

    begin = time.monotonic()

    def on_block(load: str, arm: str, results: Results) -> None:
        seen = results[load, arm]
        own, machine = seen.cpu[-1]
        console.print(
            f"{load}, {arm}: {len(seen.turns)} turns so far, {len(seen.failures)} failed, "
            f"{own:.0%} of the cores used ({machine:.0%} with everything else)",
            highlight=False,
        )
        # What ends a long run does not take what it has shown.
        save(document(plan, results, seconds=time.monotonic() - begin), state / "report.json")

    console.print(f"report: {state / 'report.json'}", soft_wrap=True)
    with ConsoleSteps(console) as steps:
        results = run(plan, state, steps, on_block)
    return document(plan, results, seconds=time.monotonic() - begin)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when the chosen routes were good enough on every load."""
    options = _parser().parse_args(argv)
    return run_judged(partial(_run, options), show=show, problems=problems)


if __name__ == "__main__":
    sys.exit(main())
