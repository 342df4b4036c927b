"""Makes the two environments: one for the services, one for the engines. Standard library only.

    python -m backhaul_local.install ROOT

An environment carries a stamp: the digest of the files that it was made from, written when it is complete. Without the
right stamp (files changed, or the making was interrupted) it is made anew.
"""

import fcntl
import hashlib
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from backhaul_local.interrupts import end_with_parent, raise_on_signals
from backhaul_local.processes import POLL_S, LocalError, Process, ProcessSpec, Supervisor

_STAMP = ".backhaul-stamp"
_QUIET_S = 10
"""A step that says nothing for so long gets a line, so that people see that it lives."""
_WAITING_S = 30

_NOISE = re.compile(r"WARNING: Location '.*' is ignored")
_SHOWN = re.compile(r"\s*(Downloading|Installing collected|ERROR|WARNING|error|fatal|note:)")
_NO_TORCH = re.compile(r"(No matching distribution found for|satisfies the requirement) torch")
_TORCH_HELP = """
PyTorch's CPU build was not found. It is not on the default package index: set PIP_EXTRA_INDEX_URL to PyTorch's
index of CPU wheels (its installation page names it), and run the same command again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment and what makes it."""

    path: Path
    sources: Sequence[Path]
    """Files, or folders of Python files, that decide what is in it."""
    commands: Sequence[Sequence[str]]
    """Arguments of its Python, in order."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    def digest(self) -> str:
        """Returns the digest of everything that decides what is in it."""
        state = hashlib.sha256(repr((sys.version_info[:3], self.commands)).encode())
        for source in self.sources:
            for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
                state.update(file.read_bytes())
        return state.hexdigest()


def environments(root: Path) -> tuple[Environment, Environment, Environment]:
    """Returns the services' environment, the engines', and the connector inside the latter."""
    projects = re.findall(r"^-e (\S+)", (root / "requirements-dev.txt").read_text(), re.MULTILINE)
    development, constraints = root / "requirements-dev.txt", root / "constraints.txt"
    nixl = root / "services" / "node-agent" / "requirements-nixl.txt"
    lock = root / "deploy" / "local" / "engine-lock.txt"
    connector = root / "services" / "node-agent" / "connector"
    pip = ["-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    services = Environment(
        path=root / ".venv",
        sources=[development, constraints, nixl, *(root / project / "pyproject.toml" for project in projects)],
        commands=[
            [*pip, "-c", str(constraints), "hatchling", "editables"],
            [*pip, "-c", str(constraints), "--no-build-isolation", "-r", str(development)],
            [*pip, "--no-deps", "-r", str(nixl)],
        ],
    )
    engines = Environment(
        path=root / ".venv-engine",
        sources=[lock],
        commands=[
            [*pip, "--no-compile", "--no-deps", "-r", str(lock)],
            # Each engine would compile all of it again at every start, for want of time to write what it compiled.
            ["-m", "compileall", "-q", "-j", "0", str(root / ".venv-engine" / "lib")],
        ],
    )
    inside = Environment(
        path=engines.path,
        sources=[lock, connector / "pyproject.toml", connector / "src"],
        commands=[[*pip, "--no-deps", "--force-reinstall", str(connector)]],
    )
    return services, engines, inside


class Installer:
    """Makes environments, one command after the other, and shows what happens."""

    def __init__(self, supervisor: Supervisor, venv_flags: Sequence[str] = ()) -> None:
        self._venv = [sys.executable, "-m", "venv", *venv_flags]
        self._supervisor = supervisor

    def ensure(self, environment: Environment) -> None:
        """Makes an environment anew unless it is complete and up to date."""
        stamp = environment.path / _STAMP
        if _read(stamp) == environment.digest():
            return
        shutil.rmtree(environment.path, ignore_errors=True)
        _say(f"Making {environment.path.name} ...")
        self._run([*self._venv, str(environment.path)])
        self._fill(environment, stamp)

    def ensure_package(self, environment: Environment) -> None:
        """Installs a package into an environment that is complete, unless it is there and up to date."""
        stamp = environment.path / f"{_STAMP}-connector"
        if _read(stamp) == environment.digest():
            return
        _say(f"Installing the connector into {environment.path.name} ...")
        stamp.unlink(missing_ok=True)
        self._fill(environment, stamp)

    def _fill(self, environment: Environment, stamp: Path) -> None:
        began = time.monotonic()
        for command in environment.commands:
            self._run([str(environment.python), *command], tolerant="compileall" in command)
        stamp.write_text(environment.digest())
        _say(f"  done in {time.monotonic() - began:.0f} s")

    def _run(self, command: Sequence[str], *, tolerant: bool = False) -> None:
        """Runs a command. ``tolerant``: its exit code does not matter (packages ship files that do not compile)."""
        process = self._supervisor.start(ProcessSpec(name="install", command=command))
        said = [line for line in _follow(process) if not tolerant]
        if process.exit_code != 0 and not tolerant:
            help_text = _TORCH_HELP if any(_NO_TORCH.search(line) for line in said) else ""
            shown = "\n".join(said[-20:])
            raise LocalError(f"this failed: {' '.join(command)}\n{shown}\nEverything it said: {process.log}{help_text}")


def _follow(process: Process) -> Iterator[str]:
    """Yields what a process says, without the noise, until it ends; shows the lines that tell of progress."""
    began = spoken = time.monotonic()
    with process.log.open(errors="replace") as log:
        log.seek(process.log_start)
        while True:
            running = process.running
            for line in filter(None, map(str.rstrip, log)):
                if _NOISE.match(line):
                    continue
                yield line
                if _SHOWN.match(line):
                    _say(f"  {line.strip()[:150]}")
                    spoken = time.monotonic()
            if not running:
                return
            if time.monotonic() - spoken > _QUIET_S:
                _say(f"  still at it, {time.monotonic() - began:.0f} s")
                spoken = time.monotonic()
            time.sleep(POLL_S)


def _say(text: str) -> None:
    print(text, flush=True)


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@contextmanager
def lock(state: Path) -> Iterator[None]:
    """Lets one installation at a time work on a checkout."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "install.lock").open("w") as file:
        _await(file)
        yield


def _await(file: TextIO) -> None:
    """Waits until nobody else holds a lock, and says so meanwhile."""
    spoken = float("-inf")
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - spoken >= _WAITING_S:
                _say("waiting for another make that installs into this checkout ...")
                spoken = time.monotonic()
            time.sleep(POLL_S)
        else:
            return


def install(root: Path, *, with_engines: bool = True) -> None:
    """Brings both environments up to date, or that of the services only. Raises LocalError when a command fails."""
    services, engines, connector = environments(root)
    logs = root / ".state" / "logs"
    with lock(root / ".state"), Supervisor(logs) as supervisor:
        installer = Installer(supervisor)
        installer.ensure(services)
        if with_engines:
            installer.ensure(engines)
            installer.ensure_package(connector)


def main() -> int:
    """Runs the installation; returns the exit code."""
    end_with_parent()
    raise_on_signals()
    try:
        install(Path(sys.argv[1]).resolve(), with_engines="--services-only" not in sys.argv[2:])
    except LocalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to start over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
