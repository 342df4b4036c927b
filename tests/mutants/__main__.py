"""Runs the mutants: each must make each of its tests fail."""

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tests.mutants
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 60
_ALL_PASSED, _SOME_FAILED = 0, 1
_NOT_RUNNING = ("NameError", "SyntaxError", "ImportError")


def all_mutants() -> list[Mutant]:
    """Returns the mutants of all modules beside this one."""
    names = [module.name for module in pkgutil.iter_modules(tests.mutants.__path__)]
    modules = [importlib.import_module(f"tests.mutants.{name}") for name in names if name not in ("mutant", "__main__")]
    return [mutant for module in modules for mutant in module.MUTANTS]


def survivors(mutant: Mutant) -> list[str]:
    """Returns the tests that pass although the code is wrong; or why the mutant cannot be applied."""
    text = (ROOT / mutant.module).read_text()
    if text.count(mutant.old) != 1:
        return [f"its text stands {text.count(mutant.old)} times in {mutant.module}"]
    source = _source_folder(ROOT / mutant.module)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        changed = Path(folder) / "src" / (ROOT / mutant.module).relative_to(source)
        changed.write_text(text.replace(mutant.old, mutant.new))
        return _passing(mutant.tests, Path(folder))


def _source_folder(module: Path) -> Path:
    return next(parent for parent in module.parents if parent.name == "src")


def _passing(tests: tuple[str, ...], folder: Path) -> list[str]:
    # The mutated package comes before the installed one.
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    # Without what these tests do not need, most of a run's second goes.
    lean = ["--noconftest", "-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:cacheprovider"]
    options = ["-q", "-rpf", "--no-header", "--tb=no", "--timeout", "30", *lean]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode not in (_ALL_PASSED, _SOME_FAILED):
        return [f"pytest ended with {done.returncode}: {done.stdout[-500:]}"]
    # A test with parameters is killed when one of its cases is.
    passed = [line.removeprefix("PASSED ") for line in done.stdout.splitlines() if line.startswith("PASSED ")]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    # Code that cannot run shows nothing.
    if broken := [line for line in failed if any(f" - {error}" in line for error in _NOT_RUNNING)]:
        return broken
    return [test for test in tests if any(p.startswith(test) for p in passed) and not any(test in f for f in failed)]


def main(names: list[str]) -> int:
    """Runs all mutants, or those named; returns how many survive."""
    chosen = [mutant for mutant in all_mutants() if not names or mutant.name in names]
    failures = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, alive in zip(chosen, pool.map(survivors, chosen), strict=True):
            failures += bool(alive)
            sys.stdout.write(f"{'SURVIVES' if alive else 'killed  '} {mutant.name} {' '.join(alive)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - failures} of {len(chosen)} mutants killed\n")
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
