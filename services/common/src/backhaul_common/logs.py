"""Logs: one line per event, a fixed phrase plus fields. JSON, or readable text on a terminal."""

import contextlib
import json
import logging
import sys
from functools import cache
from typing import TextIO

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

# Without local variables: they hold prompts and keys.
_tracebacks = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))

_REPEATING = ("opentelemetry.trace.span", "opentelemetry.baggage")
"""Libraries' loggers that warn of what callers send, and repeat it."""

_FREED = "grpc._cython.cygrpc"
"""A logger whose debug lines hold the very objects that are being freed: who keeps such a line keeps what is no more,
and the process ends with a segmentation fault (`AioServer.__dealloc__`, grpcio 1.81.1)."""

LEVELS = ("debug", "info", "warning", "error")

_log = structlog.get_logger(__name__)


def configure_logging(level: str, service: str, stream: TextIO | None = None) -> None:
    """Sends all logs, those of libraries included, to ``stream`` (standard error by default).

    ``level`` is one of `LEVELS`. Every line carries ``service``, ``logger`` (the module), and ``trace_id`` when a span
    is current.
    """
    out = sys.stderr if stream is None else stream

    @cache
    def lines_of(name: str) -> _Lines:
        return _Lines(out, name)

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _named(service),
        _add_trace_id,
    ]
    if out.isatty():
        renderer: Processor = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    else:
        shared.append(_tracebacks)
        renderer = _as_json
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, renderer],
        logger_factory=lines_of,
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in _REPEATING:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger(_FREED).setLevel(logging.INFO)


class _Lines(structlog.WriteLogger):
    """Writes our own lines, past the library's records and handlers: every turn has one."""

    def __init__(self, out: TextIO, name: str) -> None:
        super().__init__(out)
        self.name = name
        # Whoever sets levels sets the library's; what `filter_by_level` asks for.
        self.getEffectiveLevel = logging.getLogger(name).getEffectiveLevel
        self.disabled = False

    def msg(self, message: str) -> None:
        """Writes a line. As with the library's handlers what cannot be written is lost, and nobody fails by it."""
        # The disk is full, whoever reads is gone, the stream is closed.
        with contextlib.suppress(OSError, ValueError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def _as_json(_logger: WrappedLogger, _name: str, event: EventDict) -> str:
    try:
        return _encode(event)
    except Exception:  # noqa: BLE001  # no field may fail whoever logs it
        return _encode({str(name): value if isinstance(value, str) else _shown(value) for name, value in event.items()})


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  # as above
        return f"<{type(value).__name__}>"


_encode = json.JSONEncoder(default=_shown).encode


def step_level(by: int) -> None:
    """Has more logged (1) or less (-1) from now on, one of `LEVELS` at a time; says which, whatever it is."""
    root = logging.getLogger()
    now = LEVELS.index(logging.getLevelName(root.level).lower())
    level = LEVELS[min(max(now - by, 0), len(LEVELS) - 1)]
    root.setLevel(level.upper())
    _log.log(root.level, "log level changed", to=level)


def _named(service: str) -> Processor:
    def add(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    return add


def _add_trace_id(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
    return event
