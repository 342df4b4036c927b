"""Command line of the benchmark."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from backhaul_local.judged import run_judged
from backhaul_local.progress import ConsoleSteps
from benchmarks.gateway.run import Cost, Plan, run
from benchmarks.routing.machine import description
from benchmarks.routing.report import save

_MOST_SHARE = 0.05
"""Of what a token costs a router over its own API: more of it behind Envoy, and tokens do not pass it by."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway",
        description="What the tokens of streams cost a router: through Envoy, and through its own HTTP API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--streams", type=_count, default=64, metavar="N", help="streams at once")
    parser.add_argument("--tokens", type=_count, nargs=2, default=[10, 1000], metavar="N", help="of short and long")
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="times that each is measured")
    parser.add_argument(
        "--state", type=Path, default=Path(".state/bench-gateway"), help="folder for data, logs and reports"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    short, long = sorted(options.tokens)
    plan = Plan(streams=options.streams, short=short, long=long, rounds=options.rounds)
    state = options.state.resolve() / time.strftime("%Y%m%d-%H%M%S")
    with ConsoleSteps(console) as steps:
        costs = run(plan, state, steps)
    report = {"machine": description(), **asdict(plan), "ways": {way: _figures(cost) for way, cost in costs.items()}}
    save(report, state / "report.json")
    console.print(f"report: {state / 'report.json'}", soft_wrap=True)
    return report


def _figures(cost: Cost) -> dict[str, Any]:
    return {**asdict(cost), "router_s_per_1000": cost.per_1000, "envoy_s_per_1000": cost.envoy_per_1000}


def _show(report: dict[str, Any], console: Console) -> None:
    streams, short, long = report["streams"], report["short"], report["long"]
    table = Table(title=f"CPU seconds of one router, {streams} streams at once ({report['machine']})")
    table.add_column("way")
    for column in (f"{short} tokens", f"{long} tokens", "per 1,000 more", "of Envoy", "first byte, ms"):
        table.add_column(column, justify="right")
    for way, figures in report["ways"].items():
        table.add_row(
            way,
            _each(figures["short_s"]),
            _each(figures["long_s"]),
            f"{figures['router_s_per_1000']:.4f}",
            f"{figures['envoy_s_per_1000']:.4f}",
            f"{1000 * figures['first_byte_s']:.1f}",
        )
    console.print(table)


def _each(seconds: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in seconds)


def _problems(report: dict[str, Any]) -> list[str]:
    """Returns what must not be in a report."""
    envoy, http = (report["ways"][way]["router_s_per_1000"] for way in ("envoy", "http"))
    if envoy <= _MOST_SHARE * http:
        return []
    return [f"1,000 tokens through Envoy cost a router {envoy:.4f} s, over HTTP {http:.4f} s"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when tokens through Envoy cost a router next to nothing."""
    return run_judged(partial(_run, _parser().parse_args(argv)), show=_show, problems=_problems)


if __name__ == "__main__":
    sys.exit(main())
