"""Channels to Backhaul's services."""

from collections.abc import Callable

import grpc

from backhaul_common.grpc_server import MAX_MESSAGE_BYTES, NO_COMPRESSION
from backhaul_common.status import to_error
from backhaul_common.tls import Identity, RenewedChannel
from backhaul_common.tracing import client_interceptors

__all__ = ["CHANNEL_OPTIONS", "Connect", "name_options", "open_channel", "to_error"]

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    NO_COMPRESSION,
    # Peers are inside the cluster; a company's proxy is not on the way to them.
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's default grows to two minutes, shared by all callers of the channel.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Also bounds one attempt to connect: a frozen peer accepts and says nothing.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # Its own connections: closing and opening a channel starts afresh.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


Connect = Callable[[str], grpc.aio.Channel]
"""Opens a channel to an address: `open_channel`, with its options given beforehand."""


def open_channel(address: str, tls: Identity | None = None, *, name: str = "") -> grpc.aio.Channel:
    """Opens a channel to ``host:port`` (IPv6 in brackets); connects lazily, again and again.

    Over ``tls`` the peer's certificate must have ``name``, or the host where there is none. Made and closed inside the
    running event loop that uses it. Calls need a ``timeout``.
    """
    interceptors = client_interceptors()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors)
    options = (*CHANNEL_OPTIONS, *name_options(name))
    return RenewedChannel(
        tls,
        lambda credentials: grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors),
    )


def name_options(name: str) -> tuple[tuple[str, str], ...]:
    """Returns the options of a channel whose peer's certificate must have a name; none: the host that is called."""
    return (("grpc.ssl_target_name_override", name),) if name else ()
