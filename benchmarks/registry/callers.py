"""What routers and agents ask of a registry, over the API that they use; the same of the bare handlers.

Channels are gRPC's own, without the interceptors that clients of Backhaul have: what callers cost is not measured.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeAlias

import grpc

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul.registry.v1 import registry_pb2_grpc
from backhaul_registry import convert
from benchmarks.registry.load import Call
from benchmarks.registry.pointers import SCOPE, engine_of, key_of, pointer_of

LOOKUP_KEYS = 4
"""Keys of a lookup: a turn that follows some others, only the last of which has left something."""

_TIMEOUT_S = 30.0
_END_S = 300.0
"""For a registry to remove, at the end of a stream, what came over it: in steps, and tens of thousands of pointers."""
_FRESH = itertools.count(1 << 40)
"""Numbers of pointers that nobody has published."""

RegistryStub: TypeAlias = "registry_pb2_grpc.IndexServiceAsyncStub"
PublishCall = grpc.aio.StreamStreamCall[pb.PublishBlockSetsRequest, pb.PublishBlockSetsResponse]


@asynccontextmanager
async def finders(addresses: Sequence[str], count: int, pointer_count: int) -> AsyncIterator[Sequence[Call]]:
    """Yields callers that find one of the pointers, at any of the addresses."""
    async with AsyncExitStack() as stack:
        stubs = [await registry_stub(address, stack) for address in addresses]
        draw = random.Random(0)
        yield [partial(_find, stubs[index % len(stubs)], draw, pointer_count) for index in range(count)]


async def _find(stub: RegistryStub, draw: random.Random, pointer_count: int) -> None:
    keys = [key_of(next(_FRESH)) for _ in range(LOOKUP_KEYS - 1)]
    wanted = key_of(draw.randrange(pointer_count))
    answer = await stub.FindBlockSets(pb.FindBlockSetsRequest(scope=SCOPE, keys=[wanted, *keys]), timeout=_TIMEOUT_S)
    if len(answer.pointers) != 1:
        raise AssertionError(f"{len(answer.pointers)} pointers under {wanted}")


@asynccontextmanager
async def publishers(addresses: Sequence[str], count: int, batch_size: int) -> AsyncIterator[Sequence[Call]]:
    """Yields callers that publish a batch each time, each on a stream of its own that removes all at its end."""
    async with AsyncExitStack() as stack:
        stubs = [await registry_stub(address, stack) for address in addresses]
        streams = [await _open(stubs[index % len(stubs)], index) for index in range(count)]
        try:
            yield [
                partial(_publish, stream, _batches(*engine_of(index), batch_size))
                for index, stream in enumerate(streams)
            ]
        finally:
            # All at once: a registry waits a moment at the end of each stream.
            async with asyncio.timeout(_END_S):
                await asyncio.gather(*map(_end, streams))


async def _open(stub: RegistryStub, place: int) -> PublishCall:
    node_id, engine_id = engine_of(place)
    call: PublishCall = stub.PublishBlockSets()
    await call.write(
        pb.PublishBlockSetsRequest(open=pb.PublishBlockSetsRequest.Open(node_id=node_id, engine_id=engine_id))
    )
    await call.read()
    return call


async def _end(call: PublishCall) -> None:
    await call.done_writing()
    await call.read()


def _batches(node_id: str, engine_id: str, size: int) -> Iterator[pb.PublishBlockSetsRequest]:
    for nonce in itertools.count(1):
        pointers = [convert.pointer_to_proto(pointer_of(next(_FRESH))) for _ in range(size)]
        for pointer in pointers:
            pointer.node_id, pointer.engine_id = node_id, engine_id
        yield pb.PublishBlockSetsRequest(batch=pb.PublishBlockSetsRequest.Batch(nonce=nonce, upserts=pointers))


async def _publish(call: PublishCall, batches: Iterator[pb.PublishBlockSetsRequest]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        await call.write(next(batches))
        answer = await call.read()
    if not isinstance(answer, pb.PublishBlockSetsResponse):
        raise AssertionError(f"the stream ended: {await call.code()} {await call.details()}")


async def registry_stub(address: str, stack: AsyncExitStack) -> RegistryStub:
    """Returns what calls a registry, over a connection that is up."""
    return registry_pb2_grpc.IndexServiceStub(await channel_to(address, stack))


async def channel_to(address: str, stack: AsyncExitStack) -> grpc.aio.Channel:
    """Returns a connection that is up."""
    options = [("grpc.enable_http_proxy", 0)]
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
    await channel.channel_ready()
    return channel
