"""Prints what `tests/e2e/faults` recorded as a table in Markdown: `python -m tests.soak.recoveries FILE`."""

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.soak.recovery import Recovery

_HEAD = "| fault | failed turns | last failure | without reuse | holder unread |\n|---|---|---|---|---|"


def table(recoveries: Iterable[Recovery]) -> str:
    """Returns the table; of a fault that was recorded several times, the last one."""
    last = {recovery.fault: recovery for recovery in recoveries}
    return "\n".join([_HEAD, *map(_row, last.values())])


def _row(recovery: Recovery) -> str:
    failed = ", ".join(f"{count}: {told}" for told, count in recovery.failures.items()) or "none"
    seconds = (recovery.failing_s, recovery.without_reuse_s, recovery.held_unread_s)
    return " | ".join([f"| {recovery.fault}", failed, *(f"{value:.1f} s" if value else "" for value in seconds)]) + " |"


def main() -> None:
    """Reads the file that is named on the command line."""
    lines = Path(sys.argv[1]).read_bytes().splitlines()
    sys.stdout.write(table(msgspec.json.decode(line, type=Recovery) for line in lines) + "\n")


if __name__ == "__main__":
    main()
