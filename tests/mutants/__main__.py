"""Runs the mutants: each must make each of its tests fail."""

import argparse
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tests.mutants
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
_TEST_TIMEOUT_S = 30
"""A mutant may hang; its tests take a second or two, more beside tests of real engines."""
_RUN_TIMEOUT_S = 300
_HISTORIES = "4000"
"""Random ones that the model may play until one is bad."""
_ALL_PASSED, _SOME_FAILED = 0, 1
_NOT_RUNNING = ("NameError", "SyntaxError", "ImportError")
_OPTIONS = ("-q", "-rf", "--no-header", "--tb=no", "-pno:cacheprovider")
# Without what most of the tests do not need, most of a run's second goes.
_LEAN = (f"--timeout={_TEST_TIMEOUT_S}", "-pno:hypothesispytest", "-pno:anyio", "-ptests.mutants.unshrunk")


def all_mutants() -> list[Mutant]:
    """Returns the mutants of all modules beside this one."""
    names = [module.name for module in pkgutil.iter_modules(tests.mutants.__path__)]
    apart = ("__main__", "mutant", "unshrunk")
    modules = [importlib.import_module(f"tests.mutants.{name}") for name in names if name not in apart]
    return [mutant for module in modules for mutant in module.MUTANTS]


def survivors(mutant: Mutant) -> list[str]:
    """Returns the tests that do not fail although the code is wrong; or why the mutant shows nothing."""
    text = (ROOT / mutant.module).read_text()
    if text.count(mutant.old) != 1:
        return [f"its text stands {text.count(mutant.old)} times in {mutant.module}"]
    source = _source_folder(ROOT / mutant.module)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        changed = Path(folder) / "src" / (ROOT / mutant.module).relative_to(source)
        changed.write_text(text.replace(mutant.old, mutant.new))
        return _not_failing(mutant, Path(folder))


def _source_folder(module: Path) -> Path:
    return next(parent for parent in module.parents if parent.name == "src")


def _not_failing(mutant: Mutant, folder: Path) -> list[str]:
    # The mutated package comes before the installed one, in engines that the tests start, too. Where CI is set pytest
    # does not shorten what it says of failures, so that code that cannot run is always seen.
    environment = {
        **os.environ,
        "CI": "true",
        "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "BACKHAUL_HISTORIES": _HISTORIES,
    }
    command = [sys.executable, "-m", "pytest", *_options(mutant), *mutant.tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"pytest did not end within {_RUN_TIMEOUT_S} s"]
    if done.returncode not in (_ALL_PASSED, _SOME_FAILED):
        return [f"pytest ended with {done.returncode}: {done.stdout[-500:]}"]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    # Code that cannot run shows nothing.
    if broken := [line for line in failed if any(f" - {error}" in line for error in _NOT_RUNNING)]:
        return broken
    # A test with parameters is killed when one of its cases is, a class when one of its tests is.
    return [
        test
        for test in mutant.tests
        if not any(re.match(rf"FAILED {re.escape(test)}(\[|::| - |$)", line) for line in failed)
    ]


def _options(mutant: Mutant) -> list[str]:
    return [*_OPTIONS, *_LEAN, *(() if mutant.fixtures else ("--noconftest",))]


def main(names: Sequence[str] = ()) -> int:
    """Runs all mutants, or those named; returns how many survive."""
    chosen = [mutant for mutant in all_mutants() if not names or mutant.name in names]
    surviving: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        for mutant, alive in zip(chosen, pool.map(survivors, chosen), strict=True):
            line = f"{'SURVIVES' if alive else 'killed  '} {mutant.name} {' '.join(alive)}\n"
            if alive:
                surviving.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    sys.stdout.write(f"{''.join(surviving)}{len(chosen) - len(surviving)} of {len(chosen)} mutants killed\n")
    return len(surviving)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Runs mutants: each must be killed.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    sys.exit(1 if main(arguments.names) else 0)
