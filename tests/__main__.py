"""Runs all tests, in several processes.

gRPC and OpenTelemetry keep state for as long as a process lives; what thousands of tests left there is not the next
thousand's to suffer from. Tests on engines wait for clocks most of the time: what waits for nothing runs beside them.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]

Part = tuple[str, ...]

IN_TURN: tuple[Part, ...] = (("tests/contract", "tests/e2e"), ("tests/integration",))
"""Parts that run one after the other. Those of one part share engines."""

BESIDE: tuple[Part, ...] = (("tests/test_mutants.py",), ("tests/unit", "tests/model", "tests/fuzz"))
"""Parts that run one after the other beside those in turn, and yield to them."""

_YIELD = ("nice", "-n", "5")


def others() -> Part:
    """Returns the modules of tests that lie in the folder itself and are not named above."""
    named = {place for part in (*IN_TURN, *BESIDE) for place in part}
    return tuple(sorted({f"tests/{file.name}" for file in (ROOT / "tests").glob("test_*.py")} - named))


def main(arguments: Sequence[str]) -> int:
    """Runs pytest with these arguments, or all parts where there are none; returns 0 when all tests passed."""
    if arguments:
        return _pytest(arguments)
    with tempfile.TemporaryFile() as said, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(_failing, BESIDE, said)
        # What is over in seconds comes first.
        failing = [*_failing((others(), *IN_TURN)), *beside.result()]
        said.seek(0)
        sys.stdout.buffer.write(said.read())
    for part in failing:
        sys.stdout.write(f"not all passed: {' '.join(part)}\n")
    return 1 if failing else 0


def _failing(parts: Iterable[Part], said: IO[bytes] | None = None) -> list[Part]:
    return [part for part in parts if _pytest(part, said) != 0]


def _pytest(arguments: Sequence[str], said: IO[bytes] | None = None) -> int:
    command = [*(_YIELD if said else ()), sys.executable, "-m", "pytest", *arguments]
    errors = subprocess.STDOUT if said else None
    return subprocess.run(command, cwd=ROOT, stdout=said, stderr=errors, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
