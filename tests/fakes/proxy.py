"""What lies between two parts: a test can cut it, slow it down, or let it swallow everything."""

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Self

from backhaul_common.addresses import split_address

_CHUNK = 64 * 1024
_BACKLOG = 128
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets, and forgets what was not sent."""


class Proxy:
    """Passes everything on to ``target``: host:port, or the path of a Unix socket. Runs on a thread of its own.

    It listens on a loopback port, or on a Unix socket beside the target's. What was written to a Unix socket arrives,
    whatever becomes of the writer, and so it does here: once such a link is cut nothing more can be written to it, and
    what has been is still passed on. A TCP connection that is cut loses what was on its way.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.delay_s = 0.0
        """How much later every piece arrives."""
        self.passed_bytes = 0
        """What was passed on so far, in both directions."""
        self.address = ""
        self._unix = target.startswith("/")
        self._refusing = False
        self._flows = asyncio.Event()
        self._links: dict[asyncio.Task[None], tuple[socket.socket, socket.socket]] = {}
        self._listener = socket.socket(socket.AF_UNIX if self._unix else socket.AF_INET)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._listener.bind(f"{self.target}.{os.urandom(2).hex()}" if self._unix else ("127.0.0.1", 0))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        name = self._listener.getsockname()
        self.address = name if self._unix else f"{name[0]}:{name[1]}"
        self._flows.set()
        self._thread.start()
        self._accepting = asyncio.run_coroutine_threadsafe(self._accept(), self._loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accepting.cancel()
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()
        if self._unix:
            Path(self.address).unlink(missing_ok=True)

    def cut(self) -> None:
        """Ends all connections, and every new one."""
        self._refusing = True
        self._wait(self._break())

    def swallow(self) -> None:
        """Lets nothing through any more; connections stay open, new ones are accepted."""
        self._wait(self._set_flowing(flowing=False))

    def heal(self) -> None:
        """Works again."""
        self._refusing, self.delay_s = False, 0.0
        self._wait(self._set_flowing(flowing=True))

    def _wait(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _set_flowing(self, *, flowing: bool) -> None:
        if flowing:
            self._flows.set()
        else:
            self._flows.clear()

    async def _break(self) -> None:
        for task, ends in self._links.items():
            if self._unix:
                for end in ends:
                    # Its writer fails from now on; what it wrote before is still read here, and then the end.
                    _shut(end, socket.SHUT_RD)
            else:
                task.cancel()

    async def _end(self) -> None:
        for task in self._links:
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            near, _ = await self._loop.sock_accept(self._listener)
            near.setblocking(False)
            self._serve(near)

    def _serve(self, near: socket.socket) -> None:
        far = socket.socket(near.family)
        far.setblocking(False)
        task = self._loop.create_task(self._link(near, far))
        self._links[task] = (near, far)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        for end in self._links.pop(task):
            if self._refusing and not self._unix:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.close()

    async def _link(self, near: socket.socket, far: socket.socket) -> None:
        try:
            await self._loop.sock_connect(far, self.target if self._unix else split_address(self.target))
        except OSError:
            return
        if not self._refusing:
            await asyncio.gather(self._pass_on(near, far), self._pass_on(far, near))

    async def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        """Passes on until either end has gone; what the sink has written may still be read."""
        with contextlib.suppress(OSError):
            while data := await self._loop.sock_recv(source, _CHUNK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flows.wait()
                await self._loop.sock_sendall(sink, data)
                self.passed_bytes += len(data)
        _shut(sink, socket.SHUT_WR)
        _shut(source, socket.SHUT_RD)


def _shut(end: socket.socket, direction: int) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(direction)
