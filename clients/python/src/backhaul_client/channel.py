"""Channels to routers."""

import grpc

_OPTIONS = (
    # Notices a router that vanished without a word, and keeps connections through whatever drops idle ones.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's default grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # What a planned turn may hold; chunks of answers are smaller.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

Metadata = tuple[tuple[str, str], ...]


def open_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Opens a channel to ``host:port``; connects when it is used, and again when that breaks."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


def metadata_for(key: str | None, *, reuse: bool = True) -> Metadata:
    """Returns the metadata of a call."""
    pairs = [("authorization", f"Bearer {key}")] if key else []
    return tuple(pairs if reuse else [*pairs, ("x-backhaul-reuse", "off")])
