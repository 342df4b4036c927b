"""Wires one process: an engine per rank, the HTTP server over them, and their end."""

import asyncio
import contextlib
import logging
import signal
import ssl
from collections.abc import Mapping, Sequence

from aiohttp import web

from backhaul_simulator.engine import Engine
from backhaul_simulator.openai_checks import Served
from backhaul_simulator.options import EngineOptions
from backhaul_simulator.server import Server

_log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 5
"""As vLLM's server (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`)."""

_CUT_S = 0.2
"""What running requests get when the process is told to end; then their connections are cut, as vLLM does."""


async def serve(
    of_ranks: Mapping[int, EngineOptions],
    *,
    host: str,
    port: int,
    api_key: str = "",
    context: ssl.SSLContext | None = None,
    store: bool = False,
) -> int:
    """Serves until SIGTERM or SIGINT, or until an engine dies; returns the exit code.

    ``of_ranks`` are the options of each rank, in their order; with a ``context`` it is HTTPS. ``store`` says whether
    responses are kept.
    """
    engines = [Engine(options, rank=rank) for rank, options in of_ranks.items()]
    options = engines[0].options
    served = Served(
        model=options.model,
        max_model_len=engines[0].max_model_len,
        vocabulary=options.vocabulary,
        template=options.template,
    )
    server = Server(engines, served, block_size=options.block_size, api_key=api_key, store=store)
    tasks = [asyncio.create_task(engine.run(), name=f"engine-{engine.rank}") for engine in engines]
    runner = web.AppRunner(
        server.application(),
        handler_cancellation=True,
        keepalive_timeout=_KEEP_ALIVE_S,
        shutdown_timeout=_CUT_S,
        access_log=None,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
        _log.info("serving %s on %s:%d", options.model, host, port)
        died = await _until_told_or_dead(tasks)
        server.healthy = not died
        return 1 if died else 0
    finally:
        await runner.cleanup()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_told_or_dead(engines: Sequence["asyncio.Task[None]"]) -> bool:
    """Returns whether an engine has died."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    waiting = asyncio.create_task(told.wait())
    await asyncio.wait([*engines, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    for task in engines:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the engine has died", exc_info=error)
            return True
    return False
