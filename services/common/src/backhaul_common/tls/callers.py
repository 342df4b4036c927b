"""Server interceptor that lets in only callers of certain names."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import grpc
import structlog

from backhaul_common.errors import PermissionDeniedError
from backhaul_common.handlers import HANDLERS, Context, Handler, preceded

_log = structlog.get_logger(__name__)


class CallersInterceptor(grpc.aio.ServerInterceptor):
    """Refuses callers whose certificate has none of the accepted names, as PermissionDeniedError (CALLER_REFUSED).

    Names are those of the certificate's subjectAltName, of whatever kind. Health checks and reflection are open to
    whoever has a certificate. Goes inside the interceptor that maps errors.
    """

    def __init__(self, callers: Collection[str], callers_of: Mapping[str, Collection[str]]) -> None:
        """`callers_of` are those of single methods, by name; no names: everybody."""
        self._callers = frozenset(callers)
        self._callers_of = {method: frozenset(names) for method, names in callers_of.items()}
        self._wrapped = lru_cache(HANDLERS)(_guarded)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wraps the handler of one call, unless everybody may make it."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        accepted = self._callers_of.get(path.rpartition("/")[2], self._callers)
        if handler is None or not accepted or path.startswith("/grpc."):
            return handler
        return self._wrapped(handler, accepted, path)


def _guarded(handler: Handler, accepted: frozenset[str], path: str) -> Handler:
    """Returns a handler of the same kind that looks first who calls."""

    async def check(request: Any, context: Context) -> Any:
        _check(context, accepted, path)
        return request

    return preceded(handler, check, request_streaming=bool(handler.request_streaming))


def _check(context: Any, accepted: Collection[str], path: str) -> None:
    names = {name.decode(errors="replace") for name in context.auth_context().get("x509_subject_alternative_name", ())}
    if names.isdisjoint(accepted):
        _log.warning("caller refused", method=path, names=sorted(names))
        raise PermissionDeniedError("CALLER_REFUSED", "the certificate has no name that may call this")
