"""TLS for gRPC: credentials of servers, and channels whose calls go out under what is in force."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from backhaul_common.tls.files import Material
from backhaul_common.tls.identity import Identity

LAST_CALLS_S = 60.0
"""How long a channel that was replaced stays open for calls that were about to begin; those that run go on after it."""


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Returns credentials that each handshake takes from what is in force; callers show a certificate if it has CAs."""
    given = identity.material

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        if identity.material is given:
            return None
        given = identity.material
        return _configuration(given)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        newer,  # type: ignore[arg-type]  # None: nothing new (grpc, src/core/credentials/transport/ssl/ssl_credentials.h)
        require_client_authentication=bool(given.ca),
    )


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Returns what a channel shows and trusts."""
    return grpc.ssl_channel_credentials(material.ca or None, material.key or None, material.cert or None)


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca or None)


class RenewedChannel(grpc.aio.Channel):
    """A channel whose calls go out under the certificate that is in force when they begin.

    gRPC binds a channel to one certificate: there is another one for each. Calls that run stay where they are, until
    they end. Made and closed inside the running event loop that uses it.
    """

    def __init__(self, identity: Identity, open_one: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._identity = identity
        self._open_one = open_one
        self._material = identity.material
        self._channel = open_one(channel_credentials(self._material))
        self._replaced: set[grpc.aio.Channel] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Ends what runs, after ``grace`` seconds."""
        for channel in (*self._replaced, self._channel):
            await channel.close(grace)
        self._replaced.clear()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns how the connection is."""
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until it is another."""
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until there is one."""
        await self._current().channel_ready()

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        """Returns what makes calls of one method; likewise the others."""
        return lambda *call, **details: self._current().unary_unary(*method, **options)(*call, **details)

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return lambda *call, **details: self._current().unary_stream(*method, **options)(*call, **details)

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return lambda *call, **details: self._current().stream_unary(*method, **options)(*call, **details)

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return lambda *call, **details: self._current().stream_stream(*method, **options)(*call, **details)

    def _current(self) -> grpc.aio.Channel:
        material = self._identity.material
        if material is not self._material:
            self._replace(material)
        return self._channel

    def _replace(self, material: Material) -> None:
        self._replaced.add(self._channel)
        # Dropped, not closed: closing cancels what runs. gRPC ends the connection with its last call.
        asyncio.get_running_loop().call_later(LAST_CALLS_S, self._replaced.discard, self._channel)
        self._material, self._channel = material, self._open_one(channel_credentials(material))
