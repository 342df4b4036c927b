"""etcd's errors as ours. Texts and codes: etcd, api/v3rpc/rpctypes/error.go."""

import grpc

from backhaul_common.errors import (
    AbortedError,
    BackhaulError,
    FailedPreconditionError,
    InternalError,
    UnauthenticatedError,
    UnavailableError,
)

_TOKEN_TEXTS = (
    "etcdserver: invalid auth token",
    # The token was made before users or roles changed.
    "etcdserver: revision of auth store is old",
    # Authentication was switched on after this client connected.
    "etcdserver: user name is empty",
)
# gRPC core's words for a call that never left: no connection to any address of the endpoint.
_NOT_SENT_TEXTS = ("failed to connect to all addresses", "etcdserver: no leader")
# BoringSSL's and gRPC core's words for a server that is not who it should be.
_CERTIFICATE_TEXTS = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")
# grpc.aio's words for a stream that ended, for whatever reason, while something was being written to it
# (grpc, _cython/_cygrpc/aio/call.pyx.pxi, ``set_internal_error``): the status that it ended with is lost.
_BROKEN_TEXT = "Internal error from Core"
_LEASE_TEXT = "etcdserver: requested lease not found"
_AUTH_OFF_TEXT = "etcdserver: authentication is not enabled"
_PASSWORD_TEXT = "etcdserver: authentication failed"
_COMPACTED_TEXT = "required revision has been compacted"
_NO_SPACE_TEXT = "database space exceeded"
_TOO_MANY_TEXT = "etcdserver: too many requests"

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def token_expired(text: str) -> bool:
    """Tells whether a fresh token may help."""
    return text.startswith(_TOKEN_TEXTS)


def auth_off(error: grpc.aio.AioRpcError) -> bool:
    """Tells whether this etcd knows no users, so that no token is needed."""
    return _text(error).startswith(_AUTH_OFF_TEXT)


def password_refused(error: grpc.aio.AioRpcError) -> bool:
    """Tells whether user or password are wrong, whatever the token."""
    return _text(error).startswith(_PASSWORD_TEXT)


def endpoint_away(error: grpc.aio.AioRpcError) -> bool:
    """Tells whether another endpoint may do better."""
    return error.code() in _AWAY or _text(error) == _BROKEN_TEXT


def not_sent(error: grpc.aio.AioRpcError) -> bool:
    """Tells whether a failed call surely had no effect."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and any(text in _text(error) for text in _NOT_SENT_TEXTS)


def to_backhaul(error: grpc.aio.AioRpcError, endpoint: str) -> BackhaulError:
    """Returns the error to raise for a failed call."""
    text = _text(error)
    if _COMPACTED_TEXT in text:
        return AbortedError("ETCD_COMPACTED", "etcd no longer has this revision")
    if _NO_SPACE_TEXT in text:
        return FailedPreconditionError(
            "ETCD_NO_SPACE", "etcd's database is full: compact, defragment, disarm the alarm"
        )
    if text.startswith(_LEASE_TEXT):
        return AbortedError("LEASE_LOST", "etcd no longer knows the lease")
    if text.startswith(_PASSWORD_TEXT):
        return UnauthenticatedError("ETCD_AUTH", "etcd refused the user or the password", endpoint=endpoint)
    if token_expired(text) or error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return UnauthenticatedError("ETCD_AUTH", f"etcd refused the user's permission: {text}", endpoint=endpoint)
    if any(sign in text for sign in _CERTIFICATE_TEXTS):
        return UnavailableError(
            "ETCD_TLS",
            f"etcd's certificate is over, of another host, or not by the configured CA: {text}",
            endpoint=endpoint,
        )
    if endpoint_away(error):
        return UnavailableError("ETCD_UNAVAILABLE", f"etcd does not answer: {text}", endpoint=endpoint)
    if text.startswith(_TOO_MANY_TEXT):
        return UnavailableError("ETCD_BUSY", "etcd has too many requests", endpoint=endpoint)
    return InternalError("ETCD_ERROR", f"etcd answered {error.code().name}: {text}", endpoint=endpoint)


def _text(error: grpc.aio.AioRpcError) -> str:
    return error.details() or ""
