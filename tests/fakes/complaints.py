"""What was logged that should not have been."""

import logging

import pytest

_POLLER = "PollerCompletionQueue._handle_events"
"""gRPC has one poller for all loops of a process; it tells the newest when one that a test before has closed is gone
(grpc/_cython/_cygrpc/aio/completion_queue.pyx.pxi)."""


def complaints(caplog: pytest.LogCaptureFixture, *, level: int = logging.WARNING, logger: str = "") -> list[str]:
    """Returns the messages of this test from a level on, by default of all loggers."""
    records = [one for one in caplog.records if one.levelno >= level and logger in ("", one.name)]
    return [message for record in records if _POLLER not in (message := record.getMessage())]
