"""A gRPC server as every service runs it."""

import socket
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from backhaul_common.addresses import loopback, split_address
from backhaul_common.call_limit import MAX_CHECKS, MAX_WATCHES, CallLimitInterceptor
from backhaul_common.errors import UnavailableError
from backhaul_common.health import HealthServicer
from backhaul_common.interceptors import ErrorInterceptor
from backhaul_common.receiving import RECEIVE_S, ReceivingInterceptor
from backhaul_common.tls import HANDSHAKE_S, CallersInterceptor, Identity, server_credentials
from backhaul_common.tracing import server_interceptor

_log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 17 * 1024 * 1024
"""Longest message that servers and clients send and accept."""

MAX_CALLS = 4096
"""Calls with one answer, and again streams, that a server runs at once."""

MAX_CONNECTIONS = 4096
"""Connections that a server has at once; more are closed as they come."""

_SPARE_CALLS = 1000 + MAX_CHECKS + MAX_WATCHES
"""Health checks and calls about to be refused; beyond them gRPC lets clients wait, or refuses without a reason."""

NO_COMPRESSION = ("grpc.compression_enabled_algorithms_bitset", 1)
"""Sends messages as they are, and takes no others: gRPC unpacks a message whole before it looks how large it is."""

_OPTIONS = (
    NO_COMPRESSION,
    # Clients ping every 10 s, with or without calls; twice as often is still no flood. The name in gRPC's documentation
    # has "recv" in it, the one that works has not (grpc/impl/channel_arg_names.h).
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Notices clients that vanished without a word.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Two servers on one port would each get a part of the calls.
    ("grpc.so_reuseport", 0),
)


class GrpcServer:
    """Server with health, reflection, limits on calls and connections, and interceptors for errors and traces.

    Made inside the running event loop. Register servicers on `server`, then enter. Leaving stops it without grace;
    call `stop` first for a graceful end. NOT_SERVING until `set_serving`.
    """

    def __init__(
        self,
        *,
        address: str,
        service_names: Sequence[str],
        health_names: Sequence[str] = (),
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_calls: int = MAX_CALLS,
        max_connections: int = MAX_CONNECTIONS,
        receive_s: float = RECEIVE_S,
        idle_s: float | None = None,
        tls: Identity | None = None,
        callers: Collection[str] = (),
        callers_of: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """`health_names` are names beside the services' that health can be asked for.

        A request may take ``receive_s`` seconds to come; a connection without calls is closed after ``idle_s``.

        Over `tls` only callers of the names in `callers` are let in, or of those in `callers_of` for single methods;
        everybody where there are no names.
        """
        self._address = address
        self._tls = tls
        self._health = HealthServicer((*service_names, *health_names))
        limits = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_S)),
            ("grpc.max_allowed_incoming_connections", max_connections),
            *((("grpc.max_connection_idle_ms", round(1000 * idle_s)),) if idle_s else ()),
        )
        most = 2 * max_calls + _SPARE_CALLS
        self.server = grpc.aio.server(
            interceptors=(
                server_interceptor(),
                ErrorInterceptor(),
                CallLimitInterceptor(max_calls),
                *((CallersInterceptor(callers, callers_of or {}),) if tls else ()),
                ReceivingInterceptor(receive_s),
            ),
            # Streams of one connection stay open when their call has ended and the client reads nothing.
            options=(*_OPTIONS, *limits, ("grpc.max_concurrent_streams", most)),
            maximum_concurrent_rpcs=most,
        )
        self.port = 0
        """Port that the server listens on; known once entered."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)

    async def __aenter__(self) -> Self:
        """Binds and starts. Raises UnavailableError (ADDRESS_UNAVAILABLE) when the address cannot be bound."""
        try:
            self.port = self._listen()
        except RuntimeError as error:
            why = _why_not(self._address)
            raise UnavailableError("ADDRESS_UNAVAILABLE", f"cannot listen on {self._address}: {why}") from error
        await self.server.start()
        return self

    def _listen(self) -> int:
        if self._tls is not None:
            return self.server.add_secure_port(self._address, server_credentials(self._tls))
        warn_of_plaintext(self._address)
        return self.server.add_insecure_port(self._address)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop(0)

    async def set_serving(self, serving: bool) -> None:
        """Reports all services as SERVING or NOT_SERVING."""
        await self._health.set_serving(serving)

    async def set_impaired(self, service: str, impaired: bool) -> None:
        """Reports one service as NOT_SERVING whatever the others are, or no longer."""
        await self._health.set_impaired(service, impaired)

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, refuses new calls, waits up to ``grace_s`` seconds for running ones, ends the rest."""
        await self._health.end()
        await self.server.stop(grace_s)


def warn_of_plaintext(address: str) -> None:
    """Says in the log that others than this machine may listen in and call."""
    if not loopback(address):
        _log.warning(
            "listening without TLS: whoever reaches this address can read and call",
            address=address,
            what_to_do="set tls_cert, tls_key and tls_ca, or see that the network is private",
        )


def _why_not(address: str) -> str:
    """Tries for itself what gRPC failed at, whose error names no reason."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC refused it"
