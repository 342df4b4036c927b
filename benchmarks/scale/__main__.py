"""Command line of the benchmark."""

import argparse
import logging
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from backhaul_local.judged import run_judged
from benchmarks.routing.report import save
from benchmarks.scale.play import Counts, play
from benchmarks.scale.report import document, problems, show

_CLUSTERS = ("1P1D", "2P4D", "8P16D", "32P64D")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description="What turns cost the control plane on clusters of different sizes, in virtual time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--clusters", type=_cluster, nargs="+", default=[*_CLUSTERS], metavar="nPnD")
    parser.add_argument("--turns", type=_count, default=1500, metavar="N", help="about so many on each cluster")
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="times that each cluster is played")
    parser.add_argument("--seed", default="1", help="what all that is random comes from")
    parser.add_argument("--state", type=Path, default=Path(".state/bench-scale"), help="folder for reports")
    return parser


def _cluster(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*P[1-9]\d*D", text):
        raise argparse.ArgumentTypeError(f"{text} is not a number of prefill and of decode engines, as in 8P16D")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    # Services write one line a turn; here it would go to the terminal.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    results: dict[str, list[Counts]] = {name: [] for name in options.clusters}
    begin = time.monotonic()
    for number in range(options.rounds):
        for name in options.clusters:
            prefill, decode = map(int, re.findall(r"\d+", name))
            counts = play(prefill, decode, turns=options.turns, seed=f"{options.seed} {number}")
            results[name].append(counts)
            console.print(f"round {number + 1}, {name}: {counts.turns} turns", highlight=False)
    report = document(results, seed=options.seed, seconds=time.monotonic() - begin)
    path = options.state.resolve() / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    save(report, path)
    console.print(f"report: {path}", soft_wrap=True)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when a turn costs about the same on every cluster."""
    return run_judged(partial(_run, _parser().parse_args(argv)), show=show, problems=problems)


if __name__ == "__main__":
    sys.exit(main())
