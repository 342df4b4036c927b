"""Server interceptor that turns errors into statuses, at the edge and nowhere else."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Any, NoReturn

import grpc
import structlog

from backhaul_common.errors import BackhaulError, DeadlineExceededError, InternalError, UnavailableError
from backhaul_common.handlers import HANDLERS, Context, Handler, behavior_of, with_behavior
from backhaul_common.status import to_status

_log = structlog.get_logger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends failed calls with the status of their error.

    Unknown exceptions are logged and sent as INTERNAL without detail. gRPC's own AbortError passes, and so does the
    cancellation of the call; a cancellation that came from anywhere else ends the call as UNAVAILABLE, because gRPC
    would leave the client without an answer.
    """

    def __init__(self) -> None:
        self._wrapped = lru_cache(HANDLERS)(_wrap)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wraps the handler of one call. None, of an unknown method, is answered UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self._wrapped(handler, handler_call_details.method)


def _wrap(handler: Handler, method: str) -> Handler:
    """Returns a handler of the same kind with guarded behaviour."""
    behavior = behavior_of(handler)
    guarded = _guarded_stream if inspect.isasyncgenfunction(behavior) else _guarded_unary
    return with_behavior(handler, guarded(behavior, method), request_streaming=bool(handler.request_streaming))


def _guarded_unary(behavior: Any, method: str) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # the RPC border
            await _end(context, method, error)

    return call


def _guarded_stream(behavior: Any, method: str) -> Any:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        responses = behavior(request, context)
        try:
            async for response in responses:
                yield response
        except grpc.aio.AbortError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # the RPC border
            await _end(context, method, error)
        finally:
            # gRPC drops a generator whose client is gone; without this its cleanup would wait for the collector.
            await responses.aclose()

    return call


async def _end(context: Context, method: str, error: BaseException) -> NoReturn:
    if isinstance(error, asyncio.CancelledError) and _call_cancelled():
        raise error
    status = to_status(_as_backhaul(error, method))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _call_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _as_backhaul(error: BaseException, method: str) -> BackhaulError:
    match error:
        case BackhaulError():
            return error
        case TimeoutError():
            return DeadlineExceededError("TIMED_OUT", "no answer in time")
        case asyncio.CancelledError():
            return UnavailableError("CANCELLED_INSIDE", "the call was ended by the server")
        case _:
            _log.error("call failed unexpectedly", method=method, exc_info=error)
            return InternalError("INTERNAL", "internal error")
