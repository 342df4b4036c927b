"""Runs what ends with a verdict: a soak, a benchmark."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console

from backhaul_local.interrupts import end_with_parent, raise_on_signals
from backhaul_local.processes import LocalError

Report = TypeVar("Report")

_WIDTH = 160
"""Columns of what does not go to a terminal: within a pipe's usual 80 the figures of wide tables would be cut off."""


def run_judged(
    run: Callable[[Console], Report],
    *,
    show: Callable[[Report, Console], None],
    problems: Callable[[Report], Sequence[str]],
) -> int:
    """Runs it, shows its report and what is wrong with that.

    Returns the exit code: 0 when nothing is wrong, 1 when something is, 2 when it could not be run, 130 when it was
    interrupted.
    """
    end_with_parent()
    raise_on_signals()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    try:
        report = run(console)
    except LocalError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    show(report, console)
    found = problems(report)
    for problem in found:
        console.print(problem, style="bold red", markup=False, highlight=False)
    return 1 if found else 0
