"""Command line of the benchmark."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from backhaul_local.judged import run_judged
from backhaul_local.model_store import ensure_model
from backhaul_local.processes import LocalError
from backhaul_local.progress import ConsoleSteps
from benchmarks.connector import engine_arm
from benchmarks.connector.arms import STOCK
from benchmarks.connector.figures import problems, summed_up
from benchmarks.routing.machine import CpuMeter, description
from benchmarks.routing.report import save

_ROOT = Path(__file__).parents[2]
_ENGINE_PYTHON = Path(os.environ.get("BACKHAUL_ENGINE_PYTHON", _ROOT / ".venv-engine" / "bin" / "python"))

_SCHEDULERS_S = 1800


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.connector",
        description="What the connector costs an engine's scheduler, per step and per turn, beside vLLM's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokens", type=_count, nargs="+", default=[1024, 8192, 32_768, 131_072], metavar="N")
    parser.add_argument("--engine-tokens", type=_count, nargs="+", default=[1024, 8192, 32_768], metavar="N")
    parser.add_argument("--rounds", type=_count, default=5, metavar="N", help="times that each is measured")
    parser.add_argument("--retained", type=int, default=1000, metavar="N", help="sets that are retained meanwhile")
    parser.add_argument("--no-engines", action="store_true", help="vLLM's scheduler only, without engines")
    parser.add_argument("--engine-python", type=Path, default=_ENGINE_PYTHON, help="of the engines' environment")
    parser.add_argument(
        "--state", type=Path, default=Path(".state/bench-connector"), help="folder for the model, logs and reports"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    # Not resolved: the link in bin/ is what makes a Python that of an environment.
    python = options.engine_python.absolute()
    if not python.exists():
        raise LocalError(f"no engine environment at {python}: run `make install`")
    state = options.state.resolve()
    folder = state / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    meter = CpuMeter(())
    with ConsoleSteps(console) as steps:
        steps.begin("Making the model")
        model = ensure_model(python, "tiny", state / "models")
        steps.end("Making the model")
        steps.begin("vLLM's scheduler")
        measured = [*_schedulers(python, model, options, folder / "scheduler.log")]
        steps.end("vLLM's scheduler")
        report = _saved(measured, options.retained, meter, folder)
        console.print(f"report: {folder / 'report.json'}", soft_wrap=True)
        if not options.no_engines:
            measured += engine_arm.run(
                python, model, folder, tokens=options.engine_tokens, rounds=options.rounds, steps=steps
            )
            report = _saved(measured, options.retained, meter, folder)
    return report


def _saved(measured: Sequence[Mapping[str, Any]], retained: int, meter: CpuMeter, folder: Path) -> dict[str, Any]:
    """Returns the report, once it is written: what ends a run does not take what was measured before."""
    report = {
        "machine": description(),
        "busy_share": meter.shares()[1],
        "retained": retained,
        "rows": summed_up(measured),
        "measurements": measured,
    }
    save(report, folder / "report.json")
    return report


def _schedulers(python: Path, model: Path, options: argparse.Namespace, log: Path) -> Iterator[dict[str, Any]]:
    """Yields the measurements of `scheduler_arm`. Raises LocalError when it fails."""
    command = [str(python), "-m", "benchmarks.connector.scheduler_arm", str(model)]
    command += ["--tokens", *map(str, options.tokens)]
    command += ["--rounds", str(options.rounds), "--retained", str(options.retained)]
    with log.open("wb") as errors:
        try:
            done = subprocess.run(
                command,
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                check=False,
                timeout=_SCHEDULERS_S,
            )
        except subprocess.TimeoutExpired as error:
            raise LocalError(f"vLLM's scheduler did not end within {_SCHEDULERS_S} s: {log}") from error
    if done.returncode:
        raise LocalError(f"vLLM's scheduler failed: {log}")
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{"))


def _show(report: dict[str, Any], console: Console) -> None:
    busy = f"{report['busy_share']:.0%} of it busy"
    for role in ("decode", "prefill", "crowd", "engine"):
        rows = [row for row in report["rows"] if row["role"] == role]
        if rows:
            console.print(_table(f"{role}: hooks, us of processor time ({report['machine']}, {busy})", rows))


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("tokens", justify="right")
    table.add_column("connector", no_wrap=True)
    for column in ("step", "more", "turn", "more", "longest", "more", "busiest", "more", "engine's step"):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        own = row["arm"] == STOCK
        cells = [str(row["tokens"]), "vLLM's" if own else row["arm"]]
        for name in ("step_us", "turn_us", "longest_us", "busiest_us"):
            cells += [_us(row[name]), "" if own else f"{row[f'added_{name}']:+.0f}"]
        table.add_row(*cells, "" if own or "share" not in row else f"{row['share']:+.2%}")
    return table


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 when nothing takes longer than it may."""
    return run_judged(partial(_run, _parser().parse_args(argv)), show=_show, problems=_problems)


def _problems(report: dict[str, Any]) -> list[str]:
    """Returns what must not be in a report."""
    return problems(report["rows"])


if __name__ == "__main__":
    sys.exit(main())
