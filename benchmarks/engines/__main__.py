"""Command line of the benchmark."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from backhaul_local.engines import EngineOptions
from backhaul_local.judged import run_judged
from backhaul_local.model_store import ensure_model
from backhaul_local.options import Engine, StackOptions
from backhaul_local.processes import LocalError
from backhaul_local.progress import ConsoleSteps, Steps
from backhaul_local.simulated import SimulatedEngine
from benchmarks.engines.cases import Arm, Case, cases
from benchmarks.engines.report import document, problems, show
from benchmarks.engines.run import Plan, Results, run
from benchmarks.routing.report import save

_SIMULATED = ("--prefill-tokens-per-s", "2000", "--decode-step-s", "0.005", "--transfer-block-s", "0.0002")
_TTL_S = 480.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines",
        description="Time to the first token on two real engines on CPU: one-way P/D, and Backhaul.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--histories", type=_count, nargs="+", default=[1000, 4000, 8000], metavar="TOKENS")
    parser.add_argument("--replies", type=_count, nargs="+", default=[100, 400], metavar="TOKENS")
    parser.add_argument("--turns", type=_count, default=3, metavar="N", help="turns of a conversation, 2 at least")
    parser.add_argument("--rounds", type=_count, default=1, metavar="N", help="times that each arm plays each case")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument("--size", choices=["tiny", "demo", "bench"], default="bench", help="size of the random model")
    parser.add_argument("--simulated", action="store_true", help="simulated engines: tries the benchmark itself")
    parser.add_argument(
        "--engine-python",
        type=Path,
        default=Path(os.environ.get("BACKHAUL_ENGINE_PYTHON", ".venv-engine/bin/python")),
        help="Python of the environment that holds vLLM (BACKHAUL_ENGINE_PYTHON)",
    )
    parser.add_argument("--state", type=Path, default=Path(".state"), help="folder for models, data, logs and reports")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    every = cases(options.histories, options.replies, turns=max(options.turns, 2))
    plan = Plan(cases=[case for case in every if options.only in case.name], rounds=options.rounds)
    folder = options.state.resolve() / "bench-engines" / time.strftime("%Y%m%d-%H%M%S")
    report_of = partial(document, plan, engines=_description(options), simulated=options.simulated)
    with ConsoleSteps(console) as steps:
        stack = _stack(options, folder, steps)
        begin = time.monotonic()

        def on_conversation(case: Case, arm: Arm, outcome: str, results: Results) -> None:
            minutes = (time.monotonic() - begin) / 60
            console.print(f"{minutes:.1f} min: {case.name}, {arm.name}: {outcome}", highlight=False, soft_wrap=True)
            # What ends a long run does not take what it has shown.
            save(report_of(results, seconds=time.monotonic() - begin), folder / "report.json")

        console.print(f"report: {folder / 'report.json'}", soft_wrap=True)
        results = run(plan, stack, steps, on_conversation)
    return report_of(results, seconds=time.monotonic() - begin)


def _description(options: argparse.Namespace) -> str:
    return "simulated engines" if options.simulated else f"vLLM on CPU, the {options.size} model, one P and one D"


def _stack(options: argparse.Namespace, folder: Path, steps: Steps) -> StackOptions:
    if options.simulated:
        engine: Engine = SimulatedEngine(ttl_s=_TTL_S, flags=_SIMULATED)
        return StackOptions(state=folder, prefill=[engine], decode=[engine], routers=0)
    if not options.engine_python.exists():
        raise LocalError(f"no engine environment at {options.engine_python}: run `make install`")
    # Not resolved: the link in bin/ is what makes a Python that of an environment.
    python, engine = options.engine_python.absolute(), EngineOptions(ttl_s=_TTL_S)
    steps.begin("Making the model")
    model = ensure_model(python, options.size, options.state.resolve() / "models")
    steps.end("Making the model")
    return StackOptions(engine_python=python, model=model, state=folder, prefill=[engine], decode=[engine], routers=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when every target is met."""
    return run_judged(partial(_run, _parser().parse_args(argv)), show=show, problems=problems)


if __name__ == "__main__":
    sys.exit(main())
