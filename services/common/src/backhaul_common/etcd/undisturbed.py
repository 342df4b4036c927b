"""Reads that go on in etcd when nobody waits for them any more."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from backhaul_common.errors import UnavailableError

T = TypeVar("T")

LIFE_S = 30.0
"""Longest that etcd may take for a read; after that it is cancelled all the same."""

MAX_READS = 1_000
"""Reads without an answer at a time, those that nobody waits for included. One more fails at once."""


class UndisturbedReads:
    """Waits for transactions that only read, and lets them end by themselves.

    Older etcd versions, 3.5.1 for one, end with a panic when such a transaction is cancelled, or its deadline passes,
    at the wrong moment (etcd-io/etcd#14110; server/etcdserver/apply.go, ``applyTxn``): a slow etcd with impatient
    callers would lose one member after the other.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    async def wait(self, send: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Returns what the call that ``send`` makes (with the deadline `LIFE_S`) returns.

        Raises what it raises; AioRpcError (DEADLINE_EXCEEDED) after ``timeout_s`` seconds; UnavailableError
        (ETCD_BUSY), and sends nothing, when too many are without an answer. Cancellation leaves the call running.
        """
        if len(self._running) >= MAX_READS:
            raise UnavailableError("ETCD_BUSY", f"{MAX_READS} reads wait for etcd: it does not keep up")
        read = asyncio.ensure_future(send())
        self._running.add(read)
        read.add_done_callback(self._ended)
        await asyncio.wait({read}, timeout=timeout_s)
        if not read.done():
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, metadata, metadata, "no answer in time")
        return read.result()

    async def close(self) -> None:
        """Ends what still runs."""
        running = list(self._running)
        for read in running:
            read.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, read: asyncio.Future[Any]) -> None:
        self._running.discard(read)
        if not read.cancelled():
            # Nobody may be there to see it.
            read.exception()
