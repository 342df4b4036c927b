"""Starts the command line, and ends it without a traceback from the first moment on."""

import sys
from collections.abc import Sequence

from backhaul_local.interrupts import end_with_parent, raise_on_signals


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    end_with_parent()
    raise_on_signals()
    try:
        # Takes seconds on a busy machine, in which people press Ctrl-C.
        from backhaul_local.command import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        print("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
