"""Listens for HTTP, in the clear or under TLS."""

import asyncio
import os
import socket

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


async def listen(server: ApiServer, address: str, tls: Identity | None) -> asyncio.Server:
    """Binds and starts. Raises UnavailableError (ADDRESS_UNAVAILABLE) when the address cannot be bound."""
    host, port = split_address(address)
    if tls is None:
        warn_of_plaintext(address)
    try:
        listener = await asyncio.get_running_loop().create_server(
            server,
            host,
            port,
            backlog=_ACCEPTS,
            ssl=ListenerContext(tls).front if tls else None,
            ssl_handshake_timeout=HANDSHAKE_S if tls else None,
        )
    except OSError as error:
        raise UnavailableError("ADDRESS_UNAVAILABLE", f"cannot listen on {address}: {error}") from error
    for listening in listener.sockets:
        # asyncio has one number for both.
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(_BACKLOG)
    return listener
