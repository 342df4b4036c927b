"""The frame of a service process: event loop, signals, exit code."""

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable

import structlog

from backhaul_common.errors import BackhaulError
from backhaul_common.logs import step_level

_log = structlog.get_logger(__name__)

_COLLECT_AFTER = 20_000
"""Objects that are made, and not gone again, between two looks of the collector."""


def run_service(
    main: Callable[[asyncio.Event], Awaitable[None]],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Runs ``main`` until it returns and gives the exit code: 0, or 1 after an error.

    SIGTERM or SIGINT sets the event that ``main`` is given; a second one ends the process at once. SIGUSR1 has more
    logged, SIGUSR2 less, one level at a time. ``loop_factory`` makes the event loop; None: asyncio's own.
    """
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_supervised(main))
    except BackhaulError as error:
        _log.error("service failed", reason=error.reason, error=error.message)
        return 1
    except Exception as error:  # noqa: BLE001  # the process border: whatever it is, it is logged and the process ends
        _log.error("service failed unexpectedly", exc_info=error)
        return 1
    finally:
        # gRPC waits at the very end for what is left of TLS connections, two seconds; cycles of references keep it.
        gc.collect()
    return 0


async def _supervised(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, stopping)
    for number, by in ((signal.SIGUSR1, 1), (signal.SIGUSR2, -1)):
        loop.add_signal_handler(number, step_level, by)
    _collect_seldom()
    await main(stopping)


def _collect_seldom() -> None:
    """Has the collector leave alone what is loaded by now, which stays, and look less often at the rest.

    Of what calls leave nearly all goes without it: looking at it after every 700 objects took a twentieth of a
    registry's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def _on_signal(number: signal.Signals, stopping: asyncio.Event) -> None:
    if stopping.is_set():
        os._exit(128 + number)
    _log.info("stopping", signal=number.name)
    stopping.set()
