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
from backhaul_local.processes import LocalError
from benchmarks.overhead.fleet import peer_binary
from benchmarks.overhead.play import Seen
from benchmarks.overhead.report import document, problems, show
from benchmarks.overhead.run import ARMS, DIRECT, PEER, Plan, run
from benchmarks.routing.report import save

_MISSING = f"""vllm-router is not here. Install it beside, for this benchmark only:
  python3.11 -m venv .venv-peer && .venv-peer/bin/pip install -r benchmarks/overhead/requirements.txt
and name it: BACKHAUL_VLLM_ROUTER_BINARY=.venv-peer/bin/vllm-router (`make bench-overhead` does both);
or leave it out: --arms {" ".join(arm for arm in ARMS if arm != PEER)}"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description="What routers add to turns of engines that take no time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--streams", nargs="+", type=_count, default=[1, 8, 64, 256], metavar="N", help="at once")
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="times that each arm is played")
    parser.add_argument("--seconds", type=_count, default=3, metavar="S", help="that each window lasts")
    parser.add_argument("--tokens", type=_count, default=16, metavar="N", help="of a short turn's answer")
    parser.add_argument("--events", type=_count, default=4000, metavar="N", help="a second, of long streams together")
    parser.add_argument(
        "--state", type=Path, default=Path(".state/bench-overhead"), help="folder for data, logs and reports"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    peer = peer_binary() if PEER in options.arms else None
    if PEER in options.arms and peer is None:
        raise LocalError(_MISSING)
    plan = Plan(
        # Without it nothing can be said to be added.
        arms=[arm for arm in ARMS if arm in {DIRECT, *options.arms}],
        streams=options.streams,
        rounds=options.rounds,
        seconds=options.seconds,
        tokens=options.tokens,
        events_per_s=options.events,
    )
    state = options.state.resolve() / time.strftime("%Y%m%d-%H%M%S")

    def on_window(load: str, arm: str, streams: int, seen: Seen) -> None:
        console.print(f"{load}, {arm}, {streams} streams: {seen.count / seen.seconds:,.0f} a second", highlight=False)

    results, busy = run(plan, state, peer, on_window)
    report = document(plan, results, busy=busy)
    save(report, state / "report.json")
    console.print(f"report: {state / 'report.json'}", soft_wrap=True)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when every turn was answered."""
    return run_judged(partial(_run, _parser().parse_args(argv)), show=show, problems=problems)


if __name__ == "__main__":
    sys.exit(main())
