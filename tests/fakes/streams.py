"""Clients of the registry's streams, for tests."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.duration_pb2 import Duration

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.errors import BackhaulError
from backhaul_common.grpc_client import to_error

_PATIENCE_S = 10.0


class _Call:
    """One stream; leaving breaks it off."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.call.cancel()

    async def read(self) -> Any:
        """Returns the next message, grpc.aio.EOF at the end."""
        async with asyncio.timeout(_PATIENCE_S):
            return await self.call.read()

    async def ended(self) -> BackhaulError | None:
        """Waits for the end of the stream and returns its error; None for a good end."""
        try:
            while await self.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return to_error(error)
        return None

    async def failure(self) -> BackhaulError:
        """Waits for the end of the stream, which must be an error."""
        error = await self.ended()
        assert error is not None
        return error


class Watching(_Call):
    """A watch."""

    async def next(self) -> Any:
        """Returns the next message that says something."""
        while (message := await self.read()) is not grpc.aio.EOF:
            if message.WhichOneof("what"):
                return message
        raise AssertionError("the watch ended")

    async def until(self, holds: Callable[[Any], bool]) -> Any:
        """Returns the first message for which ``holds``."""
        while not holds(message := await self.next()):
            pass
        return message


def resuming(message: pb.WatchNodesResponse) -> pb.WatchNodesRequest:
    """Returns the request of a client that has seen ``message`` and comes back."""
    return pb.WatchNodesRequest(start_revision=message.revision, start_digest=message.digest)


class Joining(_Call):
    """A node's join stream."""

    def __init__(self, stub: Any) -> None:
        super().__init__(stub.JoinNode())
        self._sequence = 0

    async def send(self, **fields: Any) -> Any:
        """Sends one message and returns the answer."""
        self._sequence += 1
        await self.call.write(pb.JoinNodeRequest(**{"sequence": self._sequence, **fields}))
        return await self.read()

    async def join(self, node: pb.Node, *, ttl_s: int | None = None, lease_id: int = 0) -> Any:
        """Sends the first message and returns the answer."""
        ttl = None if ttl_s is None else Duration(seconds=ttl_s)
        return await self.send(join=pb.JoinNodeRequest.Join(node=node, ttl=ttl, lease_id=lease_id))

    async def fails(self, **fields: Any) -> BackhaulError:
        """Sends one message and returns the error that ends the stream."""
        try:
            await self.send(**fields)
        except grpc.aio.AioRpcError as error:
            return to_error(error)
        raise AssertionError("no error")

    async def refused(self, node: pb.Node, *, lease_id: int = 0) -> BackhaulError:
        """Sends a join that is refused and returns the error."""
        return await self.fails(join=pb.JoinNodeRequest.Join(node=node, lease_id=lease_id))


class Publishing(_Call):
    """An engine's publish stream."""

    def __init__(self, stub: Any) -> None:
        super().__init__(stub.PublishBlockSets())
        self._nonce = 0

    async def open(self, node_id: str = "d1", engine_id: str = "e1") -> Any:
        """Opens and returns the answer."""
        opening = pb.PublishBlockSetsRequest.Open(node_id=node_id, engine_id=engine_id)
        await self.call.write(pb.PublishBlockSetsRequest(open=opening))
        return await self.read()

    async def batch(self, upserts: Any = (), removals: Any = (), nonce: int | None = None) -> Any:
        """Sends a batch and returns the acknowledgement."""
        self._nonce = self._nonce + 1 if nonce is None else nonce
        batch = pb.PublishBlockSetsRequest.Batch(nonce=self._nonce, upserts=upserts, removals=removals)
        await self.call.write(pb.PublishBlockSetsRequest(batch=batch))
        return await self.read()

    async def fails(self, **batch: Any) -> BackhaulError:
        """Sends a batch and returns the error that ends the stream."""
        try:
            await self.batch(**batch)
        except grpc.aio.AioRpcError as error:
            return to_error(error)
        raise AssertionError("no error")

    async def finish(self) -> None:
        """Half-closes and waits for the end."""
        await self.call.done_writing()
        assert await self.ended() is None
