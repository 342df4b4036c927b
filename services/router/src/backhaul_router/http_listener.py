"""Listens for HTTP, in the clear or under TLS."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from typing import Any

from backhaul_common.addresses import split_address
from backhaul_common.errors import UnavailableError
from backhaul_common.grpc_server import warn_of_plaintext
from backhaul_common.tls import HANDSHAKE_S, Identity, ListenerContext
from backhaul_router.http_protocol import ApiServer

_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
_ACCEPTS = 4
"""Connections accepted at once, before room is made for them. Out of files, asyncio fails, and logs it, so often a
second (selector_events.py, _accept_connection)."""
_LAST_HANDSHAKES_S = 0.5


class Listener:
    """Takes connections for a server, until it is closed."""

    def __init__(self, server: ApiServer, listening: asyncio.Server, ssl_context: ssl.SSLContext | None) -> None:
        self._server = server
        self._listening = listening
        self._ssl_context = ssl_context
        self.port: int = listening.sockets[0].getsockname()[1]
        """Port that it listens on."""

    async def close(self) -> None:
        """Takes the connections that clients have already, and no more.

        The kernel makes a connection before anybody accepts it, and resets it when the socket that listens is closed.
        Handshakes that take long are given up.
        """
        queues = [_duplicate(listening) for listening in self._listening.sockets]
        self._listening.close()
        waiting = [connection for queue in queues for connection in _accept_all(queue)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_HANDSHAKES_S):
                await asyncio.gather(*map(self._take, waiting))

    async def _take(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # A client that is gone again, or whose handshake fails.
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(self._server, connection, **_tls_options(self._ssl_context))


async def listen(server: ApiServer, address: str, tls: Identity | None) -> Listener:
    """Binds and starts. Raises UnavailableError (ADDRESS_UNAVAILABLE) when the address cannot be bound."""
    host, port = split_address(address)
    if tls is None:
        warn_of_plaintext(address)
    context = ListenerContext(tls).front if tls else None
    try:
        listening = await asyncio.get_running_loop().create_server(
            server, host, port, backlog=_ACCEPTS, **_tls_options(context)
        )
    except OSError as error:
        raise UnavailableError("ADDRESS_UNAVAILABLE", f"cannot listen on {address}: {error}") from error
    for each in listening.sockets:
        # asyncio has one number for both.
        with _duplicate(each) as same:
            same.listen(_BACKLOG)
    return Listener(server, listening, context)


def _tls_options(context: ssl.SSLContext | None) -> dict[str, Any]:
    return {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S} if context else {}


def _duplicate(listening: socket.socket) -> socket.socket:
    """Returns another handle of a socket that asyncio does not let be used."""
    return socket.socket(fileno=os.dup(listening.fileno()))


def _accept_all(queue: socket.socket) -> Iterator[socket.socket]:
    """Yields the connections that wait to be accepted, then closes."""
    with queue:
        queue.setblocking(False)
        # Empty, or no more files may be open.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = queue.accept()
                connection.setblocking(False)
                yield connection
