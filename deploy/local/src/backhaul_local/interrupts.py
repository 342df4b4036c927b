"""How a launcher learns that it shall end. Standard library only."""

import ctypes
import os
import signal
from types import FrameType

_PR_SET_PDEATHSIG = 1


def raise_on_signals() -> None:
    """Makes SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, so that everything started is ended on the way out."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def end_with_parent() -> None:
    """Has the kernel send SIGTERM when `make` dies, under which alone nobody could reach this process any more."""
    if "MAKELEVEL" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
