"""What the machine had to do meanwhile: a machine that is busy is measured instead of what runs on it."""

import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def description() -> str:
    """Returns what kind of machine this is."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


class CpuMeter:
    """Counts CPU time from its making on. Linux only."""

    def __init__(self, pids: Iterable[int]) -> None:
        """``pids``: processes that belong to the measurement, besides this one.

        Those of their process groups do, too: a vLLM server computes in a process of its own.
        """
        self._groups = frozenset(pids)
        self._begin = time.monotonic()
        self._own = self._own_s()
        self._all = _busy_s()

    def shares(self) -> tuple[float, float]:
        """Returns the share of all cores that these processes used, and that everything on the machine used."""
        available_s = (time.monotonic() - self._begin) * (os.cpu_count() or 1)
        return (self._own_s() - self._own) / available_s, (_busy_s() - self._all) / available_s

    def _own_s(self) -> float:
        return process_s(os.getpid()) + sum(map(process_s, self._members()))

    def _members(self) -> Iterator[int]:
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and _group(pid := int(folder.name)) in self._groups and pid != os.getpid():
                yield pid


def process_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used, 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _group(pid: int) -> int | None:
    """Returns the process group of a process, None of one that is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _busy_s() -> float:
    """User, nice and system time of all cores (proc(5))."""
    fields = Path("/proc/stat").read_text().split(maxsplit=4)
    return sum(map(int, fields[1:4])) / _TICKS_PER_S
