"""Command line of the soak."""

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from backhaul_local.judged import run_judged
from backhaul_local.progress import ConsoleSteps
from backhaul_local.stack import Stack
from tests.soak.cluster import ETCD_QUOTA_BYTES, cluster_options
from tests.soak.etcd_faults import EtcdFaults
from tests.soak.faults import everything
from tests.soak.network import BreakableNetwork
from tests.soak.report import problems, save, show
from tests.soak.soak import Plan, soak
from tests.soak.tally import Tally

_PROGRESS_S = 10.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="Random conversations against a whole stack of simulated engines; every text is checked.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--turns", type=int, default=200_000, metavar="N", help="turns to play")
    parser.add_argument("--seed", type=int, help="what all that is random comes from (default: a new one)")
    parser.add_argument("--concurrency", type=int, default=48, metavar="N", help="conversations at a time")
    parser.add_argument(
        "--fault-every-s", type=float, default=0.0, metavar="S", help="mean pause between faults; 0: none"
    )
    parser.add_argument("--routers", type=int, default=8, metavar="N", help="router replicas")
    parser.add_argument("--registries", type=int, default=3, metavar="N", help="registry replicas")
    parser.add_argument("--etcd-members", type=int, default=3, metavar="N", help="members of the etcd cluster")
    parser.add_argument("--prefill", type=int, default=2, metavar="N", help="prefill engines")
    parser.add_argument("--decode", type=int, default=2, metavar="N", help="decode engines")
    parser.add_argument("--state", type=Path, default=Path(".state/soak"), help="folder for data, logs and reports")
    return parser


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    seed = options.seed if options.seed is not None else secrets.randbelow(10**9)
    plan = Plan(
        seed=seed, turn_count=options.turns, concurrency=options.concurrency, fault_every_s=options.fault_every_s
    )
    state = options.state.resolve() / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    console.print(f"seed {seed}, logs in {state / 'logs'}", soft_wrap=True)
    with ExitStack() as exits:
        network = exits.enter_context(BreakableNetwork()) if plan.fault_every_s else None
        stack_options = cluster_options(
            state,
            seed=seed,
            routers=options.routers,
            registries=options.registries,
            etcd_members=options.etcd_members,
            prefill=options.prefill,
            decode=options.decode,
            network=network,
            etcd_quota_bytes=ETCD_QUOTA_BYTES if network else 0,
        )
        with ConsoleSteps(console) as steps:
            stack = exits.enter_context(Stack(stack_options, steps))
        draw = None
        if network:
            etcd = EtcdFaults(stack, network, state / "snapshots")
            draw = partial(everything, stack, network, etcd=etcd.draw)
        report = asyncio.run(soak(stack, plan, draw, _Progress(console, plan.turn_count)))
    save(report, state / "report.json")
    console.print(f"report: {state / 'report.json'}", soft_wrap=True)
    return report


class _Progress:
    """Says now and then how far a run is."""

    def __init__(self, console: Console, turn_count: int) -> None:
        self._console = console
        self._turn_count = turn_count
        self._begin = self._said = time.monotonic()

    def __call__(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self._said < _PROGRESS_S:
            return
        self._said = now
        speed = tally.turn_count / (now - self._begin)
        failed = sum(tally.failures.values())
        self._console.print(
            f"{tally.turn_count} of {self._turn_count} turns, {speed:.0f}/s, {tally.routes['warm']} warm, "
            f"{failed} failed, {tally.wrong_count} wrong texts",
            soft_wrap=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak; returns 0 when nothing was wrong."""
    options = _parser().parse_args(argv)
    return run_judged(
        partial(_run, options), show=show, problems=partial(problems, faults_allowed=bool(options.fault_every_s))
    )


if __name__ == "__main__":
    sys.exit(main())
