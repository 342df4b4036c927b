"""Lines as a service logs them."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from backhaul_common.logs import configure_logging


class LogLines:
    """What was logged since logging was configured."""

    def __init__(self, out: io.StringIO) -> None:
        self._out = out

    def all(self) -> list[dict[str, Any]]:
        """Returns all lines but asyncio's own."""
        return [line for line in map(json.loads, self._out.getvalue().splitlines()) if line["logger"] != "asyncio"]

    def traces(self, *events: str) -> dict[str, str | None]:
        """Returns the trace that the last line of each event names; of these events, or of all."""
        return {line["event"]: line.get("trace_id") for line in self.all() if not events or line["event"] in events}


@contextmanager
def logging_as_before() -> Iterator[None]:
    """Leaves logging as it was, whatever is configured meanwhile."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        structlog.reset_defaults()
        root.handlers[:] = handlers
        # Set as an attribute the level would leave what loggers remember of it.
        root.setLevel(level)


@contextmanager
def log_lines(service: str) -> Iterator[LogLines]:
    """Configures logging as a service does, on every level, until it is left."""
    out = io.StringIO()
    with logging_as_before():
        configure_logging("debug", service, out)
        yield LogLines(out)
