"""Child processes under supervision: one process group each, logs in files, none left behind. Standard library only."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from backhaul_local import guardian

POLL_S = 0.2
"""Pause between two looks at a process or its readiness."""

_TAIL_LINES = 30


class LocalError(Exception):
    """Something on this machine keeps the stack from running. The message is for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start a process; kept, so that it can be started again."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own environment."""


class Process:
    """A running (or ended) child in a process group of its own."""

    def __init__(self, spec: ProcessSpec, child: "subprocess.Popen[bytes]", log: Path, log_start: int) -> None:
        self.spec = spec
        self.log = log
        self.log_start = log_start
        """Size of the log in bytes when the process was started."""
        self.ended_here = False
        """Whether the supervisor ended it, so that its end is no failure."""
        self._child = child

    @property
    def name(self) -> str:
        """Name, unique within the supervisor."""
        return self.spec.name

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._child.poll()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the whole group; nothing happens when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def freeze(self) -> None:
        """Stops it with SIGSTOP: it keeps its connections and answers nothing."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen process go on."""
        self.signal(signal.SIGCONT)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits until it ends; returns its exit code, or None when ``timeout_s`` passed first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(timeout_s)
        return None

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """Returns the last lines of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


class Supervisor:
    """Starts processes and ends them all on exit.

    A guardian process kills whatever still runs if the launcher dies without getting there, SIGKILL included.
    ``grace_s``: what processes get on exit, in seconds, to end in good order.
    """

    def __init__(self, logs: Path, *, grace_s: float = 10) -> None:
        self._logs = logs
        self._grace_s = grace_s
        self._processes: dict[str, Process] = {}
        self._pipe = -1
        self._guardian: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        reader, self._pipe = os.pipe()
        try:
            self._guardian = subprocess.Popen(
                [*_script("guard"), str(reader)], pass_fds=[reader], start_new_session=True, stdin=subprocess.DEVNULL
            )
        finally:
            os.close(reader)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop([*reversed(self._processes.values())], self._grace_s)
        finally:
            os.close(self._pipe)
            if self._guardian is not None:
                self._guardian.wait()
            for process in self._processes.values():
                process.wait()

    def __getitem__(self, name: str) -> Process:
        return self._processes[name]

    def __iter__(self) -> Iterator[Process]:
        return iter(self._processes.values())

    def start(self, spec: ProcessSpec) -> Process:
        """Starts a process (again). Its output is appended to ``<name>.log``.

        Raises LocalError when one of that name still runs.
        """
        if spec.name in self._processes and self._processes[spec.name].running:
            raise LocalError(f"{spec.name} is already running")
        log = self._logs / f"{spec.name}.log"
        with log.open("ab") as output:
            log_start = output.tell()
            child = subprocess.Popen(
                [*_script("launch"), str(self._pipe), *spec.command],
                env={**os.environ, **spec.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[self._pipe],
                process_group=0,
            )
        process = self._processes[spec.name] = Process(spec, child, log, log_start)
        return process

    def restart(self, name: str) -> Process:
        """Starts an ended process with the command it had, on the data it left."""
        return self.start(self._processes[name].spec)

    def kill(self, name: str) -> None:
        """Kills a process with SIGKILL and waits until it is gone."""
        self.stop([self._processes[name]], grace_s=0)

    def stop(self, processes: Sequence[Process], grace_s: float) -> None:
        """Ends processes: SIGTERM to all, SIGKILL to those that are still there after ``grace_s`` seconds."""
        deadline = time.monotonic() + grace_s
        try:
            for process in processes:
                if process.running and grace_s:
                    process.thaw()
                    process.signal(signal.SIGTERM)
            while any(process.running for process in processes) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        finally:
            for process in processes:
                self._finish(process)

    def wait_until(self, name: str, ready: Callable[[], bool], timeout_s: float) -> None:
        """Waits until ``ready`` says yes.

        Raises LocalError with the end of the log when a process ends first, or ``timeout_s`` passes.
        """
        self.wait_for_all({name: ready}, timeout_s)

    def wait_for_all(
        self,
        ready: Mapping[str, Callable[[], bool]],
        timeout_s: float,
        on_ready: Callable[[str], None] = lambda _: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until all are ready, and tells ``on_ready`` each one's name at that moment.

        ``on_wait`` is called between two looks.

        Raises LocalError with the end of a log when any process has ended by itself, or ``timeout_s`` passes.
        """
        deadline = time.monotonic() + timeout_s
        pending = dict(ready)
        while True:
            for name in [name for name, is_ready in pending.items() if is_ready()]:
                del pending[name]
                on_ready(name)
            if not pending:
                return
            self.check_all()
            if time.monotonic() > deadline:
                raise self._failure(self._processes[next(iter(pending))], f"was not ready after {timeout_s:.0f} s")
            on_wait()
            time.sleep(POLL_S)

    def check_all(self, may_end: Collection[str] = ()) -> list[str]:
        """Returns which of ``may_end`` have ended well: somebody else has told them to. Each is returned once.

        Raises LocalError with the end of its log when any other process has ended and nobody here ended it.
        """
        ended = [process for process in self if not process.running and not process.ended_here]
        for process in ended:
            if process.exit_code or process.name not in may_end:
                raise self._failure(process, f"ended with exit code {process.exit_code}")
            self._finish(process)
        return [process.name for process in ended]

    def _finish(self, process: Process) -> None:
        """Kills what is left of a group (the leader may have left children), reaps, and takes it from the guardian."""
        process.ended_here = True
        process.signal(signal.SIGKILL)
        process.wait()
        with contextlib.suppress(OSError):
            os.write(self._pipe, f"-{process.pid}\n".encode())

    def _failure(self, process: Process, what: str) -> LocalError:
        tail = process.log_tail() or "(it has said nothing: the machine may be too busy to start it in time)"
        return LocalError(f"{process.name} {what}; the end of {process.log}:\n{tail}")


def _script(mode: str) -> list[str]:
    return [sys.executable, "-I", "-S", guardian.__file__, mode]
