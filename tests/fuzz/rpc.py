"""Targets for gRPC services: every method gets messages like its samples, on the way that gRPC would give them."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any, cast

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from backhaul_common.errors import BackhaulError
from backhaul_common.status import to_status
from tests.fuzz.inputs import Source, edited, lists_of, messages_of, one_of, samples_of
from tests.fuzz.running import run
from tests.fuzz.target import Target

_MOST_ANSWERS = 20
_METADATA = {
    "authorization": b"Bearer key",
    "x-request-id": b"id-1",
    "x-session-id": b"session-1",
    "x-backhaul-reuse": b"off",
    "traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": b"a=1,b=2",
}

Metadata = dict[str, str]
Call = tuple[str, list[bytes], Metadata]


class _EnoughError(Exception):
    """The caller has read all that it wanted."""


class CallContext:
    """One call, as far as the services look at it."""

    def __init__(self, metadata: Mapping[str, str] | None = None) -> None:
        self._metadata = tuple((metadata or {}).items())
        self.written: list[Message] = []

    async def send_initial_metadata(self, pairs: Sequence[tuple[str, str]]) -> None:
        # gRPC takes names of small letters alone, and values that can be printed.
        assert all(name.islower() and value.isascii() and value.isprintable() for name, value in pairs), pairs

    async def write(self, message: Message) -> None:
        self.written.append(message)
        if len(self.written) >= _MOST_ANSWERS:
            raise _EnoughError

    def cancelled(self) -> bool:
        return False

    def time_remaining(self) -> float | None:
        return 5.0

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def abort(self, *status: object) -> None:
        raise AssertionError(status)


def target_of(
    name: str,
    service: ServiceDescriptor,
    made: Callable[[], object],
    samples: Mapping[str, Sequence[Message]],
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Target:
    """Returns the target of a whole service.

    ``made`` makes a servicer for each call, which runs ``within`` something; ``samples`` has every method.
    """
    calls = [_calls(method, given) for method, given in samples.items()]
    reads = tuple(f"rpc:{service.full_name}/{method}" for method in samples)

    def accepts(call: Call) -> bool:
        with within():
            return run(_accepts(service, made, call))

    return Target(name, reads, one_of(*calls), accepts)


def _calls(method: str, samples: Sequence[Message]) -> Source[Call]:
    messages = lists_of(messages_of(*samples), least=1, most=3)
    return lambda chance: (method, messages(chance), _metadata(chance))


def _metadata(chance: Random) -> Metadata:
    """Returns what a caller says beside its messages: of such names, what gRPC lets through."""
    names = chance.sample(sorted(_METADATA), chance.randrange(4))
    return {name: _printable(edited(samples_of(_METADATA[name]))(chance)) for name in names}


def _printable(data: bytes) -> str:
    return "".join(map(chr, filter(range(32, 127).__contains__, data)))


async def _accepts(service: ServiceDescriptor, made: Callable[[], object], call: Call) -> bool:
    method = service.methods_by_name[call[0]]
    kind: Any = GetMessageClass(method.input_type)
    try:
        messages: list[Message] = [kind.FromString(data) for data in call[1]]
    except DecodeError:
        # gRPC answers that.
        return False
    handler, context = getattr(made(), method.name), CallContext(call[2])
    try:
        answer = handler(_stream(messages) if method.client_streaming else messages[0], context)
        if inspect.isasyncgen(answer):
            context.written += [cast(Message, step) async for step in answer]
        elif (message := await answer) is not None:
            context.written.append(message)
    except BackhaulError as error:
        to_status(error)
        return False
    except _EnoughError:
        pass
    except BaseExceptionGroup as group:
        if group.split((BackhaulError, _EnoughError))[1] is not None:
            raise
        return False
    for message in context.written:
        message.SerializeToString()
    return True


async def _stream(messages: Sequence[Message]) -> AsyncIterator[Message]:
    for message in messages:
        yield message
        await asyncio.sleep(0)
