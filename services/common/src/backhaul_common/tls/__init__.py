"""TLS on every hop: files that are watched, credentials that follow them, and names that may call."""

from backhaul_common.tls.callers import CallersInterceptor
from backhaul_common.tls.channels import RenewedChannel, channel_credentials, server_credentials
from backhaul_common.tls.contexts import HANDSHAKE_S, CallerContext, ListenerContext
from backhaul_common.tls.files import TlsFiles
from backhaul_common.tls.identity import Identity, keep_current
from backhaul_common.tls.settings import EngineTlsSettings, TlsSettings

__all__ = [
    "HANDSHAKE_S",
    "CallerContext",
    "CallersInterceptor",
    "EngineTlsSettings",
    "Identity",
    "ListenerContext",
    "RenewedChannel",
    "TlsFiles",
    "TlsSettings",
    "channel_credentials",
    "keep_current",
    "server_credentials",
]
