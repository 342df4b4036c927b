"""Handlers of gRPC methods, as interceptors wrap them."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

# Generic in the stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

HANDLERS = 64
"""Handlers whose wrapped ones an interceptor keeps: more than servers have methods. Those of single calls fall out."""

First = Callable[[Any, Context], Awaitable[Any]]
"""Takes a call's request, or its messages, and returns what the method gets in their place."""


def behavior_of(handler: Handler) -> Any:
    """Returns the function that answers."""
    return getattr(handler, f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}")


def with_behavior(handler: Handler, behavior: Any, *, request_streaming: bool) -> Handler:
    """Returns a handler of the same method with another function."""
    factory = getattr(grpc, f"{_arity(request_streaming)}_{_arity(handler.response_streaming)}_rpc_method_handler")
    changed: Handler = factory(
        behavior, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
    return changed


def preceded(handler: Handler, first: First, *, request_streaming: bool) -> Handler:
    """Returns a handler of the same kind that does something first; where that raises, the method is not run.

    With `request_streaming` it begins before any message has come, also where the method takes one request.
    """
    behavior = behavior_of(handler)

    async def call(request: Any, context: Context) -> Any:
        return await behavior(await first(request, context), context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        async with aclosing(behavior(await first(request, context), context)) as answers:
            async for answer in answers:
                yield answer

    # Streams are answered by generators, or by coroutines that write.
    either = stream if inspect.isasyncgenfunction(behavior) else call
    return with_behavior(handler, either, request_streaming=request_streaming)


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
