"""Ends what a launcher leaves behind, however the launcher ends. Standard library only; runs as a script.

``guard FD`` reads lines from a pipe: ``+GROUP`` puts a process group under guard, ``-GROUP`` takes it out. When the
pipe closes, because the launcher closed it or died, every group still under guard is killed.

``launch FD COMMAND...`` puts its own process group under guard and becomes COMMAND. The child itself writes the line,
and holds the pipe open until it has: there is no moment at which it runs unguarded.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

_SWEEPS = 50
_PAUSE_S = 0.1


def follow(lines: Iterable[str]) -> set[int]:
    """Returns the groups that are still under guard after ``lines``."""
    groups: set[int] = set()
    for line in lines:
        action, group = line[:1], int(line[1:])
        if action == "+":
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def kill_groups(groups: Iterable[int]) -> None:
    """Kills process groups and waits until they are gone, for 5 s at most."""
    left = set(groups)
    for _ in range(_SWEEPS):
        left = {group for group in left if _kill(group)}
        if not left:
            return
        time.sleep(_PAUSE_S)


def _kill(group: int) -> bool:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def guard(pipe: int) -> None:
    """Follows the pipe to its end, then kills what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(pipe) as lines:
        groups = follow(lines)
    kill_groups(groups)


def launch(pipe: int, command: list[str]) -> None:
    """Becomes ``command``, under guard. Exits with 127 when it cannot be run."""
    os.write(pipe, f"+{os.getpgrp()}\n".encode())
    os.close(pipe)
    with contextlib.suppress(OSError):
        os.execvp(command[0], command)
    sys.stderr.write(f"cannot run {command[0]}\n")
    sys.exit(127)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard(int(sys.argv[2]))
    else:
        launch(int(sys.argv[2]), sys.argv[3:])
