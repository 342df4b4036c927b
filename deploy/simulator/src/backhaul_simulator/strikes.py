"""Carries out what a fault's script says about one request."""

import asyncio
import os
import signal

from aiohttp import web

from backhaul_simulator.faults import Bare500, Delay, Die, Fault, Hang, Refuse, Reset
from backhaul_simulator.openai_errors import RefusedError, failed

_ARRIVE_S = 0.02
"""What was written before a connection is reset shall arrive."""


class Strike:
    """A request's fault, if it has one."""

    def __init__(self, request: web.Request, fault: Fault | None) -> None:
        self._request = request
        self._fault = fault

    async def before_engine(self) -> None:
        """Called before the engine is asked. Raises RefusedError; may never return."""
        fault = self._fault
        if isinstance(fault, Hang):
            await asyncio.Event().wait()
        elif isinstance(fault, Bare500):
            raise failed()
        elif isinstance(fault, Refuse):
            raise RefusedError(fault.message, status=fault.status)
        elif isinstance(fault, Delay):
            await asyncio.sleep(fault.seconds)
        elif isinstance(fault, Reset | Die) and fault.after == 0:
            await self._break_off()

    async def after_events(self, count: int) -> None:
        """Called when so many events of a stream were sent."""
        if isinstance(self._fault, Reset | Die) and self._fault.after == count:
            await self._break_off()

    async def before_reply(self) -> None:
        """Called when a reply that is not streamed is ready."""
        if isinstance(self._fault, Reset | Die):
            await self._break_off()

    async def after_stream(self) -> None:
        """Called when the last byte of a stream was sent."""
        if isinstance(self._fault, Reset | Die):
            await self._break_off()

    async def _break_off(self) -> None:
        if isinstance(self._fault, Die):
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(_ARRIVE_S)
        if self._request.transport is not None:
            self._request.transport.abort()
        # As if the client had gone: the server drops the connection, and says nothing.
        raise asyncio.CancelledError
