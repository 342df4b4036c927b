"""One etcd watch shared by all clients that watch the same prefix."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Generic, TypeVar

import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import BackhaulError, ResourceExhaustedError, UnavailableError
from backhaul_common.etcd import KeyValue, Outage, Update, follow
from backhaul_common.etcd.listwatch import Source
from backhaul_registry.core.feed import Change, Feed, Opening
from backhaul_registry.together import run_until_first

_log = structlog.get_logger(__name__)

QUEUE_LENGTH = 256
"""Changes that wait for one client. A client that falls further behind is ended (WATCH_TOO_SLOW), and resyncs."""

HISTORY_LENGTH = 4_096
"""Changes that a client may have missed and still resume."""

LISTING_S = 5.0
"""Longest wait of a client for a listing: for the first, or for the one that ends an outage."""

T = TypeVar("T")


class Subscription(Generic[T]):
    """One client's view: the opening, then changes."""

    def __init__(self, opening: Opening[T]) -> None:
        self.opening = opening
        self._queue: asyncio.Queue[Change[T]] = asyncio.Queue(QUEUE_LENGTH)
        self._ended: BackhaulError | None = None
        self._wake = asyncio.Event()

    async def next(self, timeout_s: float) -> Change[T] | None:
        """Returns the next change; None when there is none for ``timeout_s`` seconds.

        Raises what ended the subscription, without delivering what is still queued.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            # What came in this very moment must not be overtaken by a sign of life at a later revision.
            if not self._wake.is_set():
                return None
        if self._ended is not None:
            raise self._ended
        change = self._queue.get_nowait()
        if self._queue.empty():
            self._wake.clear()
        return change

    def offer(self, change: Change[T]) -> None:
        """Queues a change; ends the subscription when the queue is full."""
        try:
            self._queue.put_nowait(change)
        except asyncio.QueueFull:
            self.end(ResourceExhaustedError("WATCH_TOO_SLOW", "changes came faster than they were read: watch again"))
        self._wake.set()

    def end(self, error: BackhaulError) -> None:
        """Ends the subscription."""
        self._ended = self._ended or error
        self._wake.set()


class Hub(Generic[T]):
    """Follows a prefix while somebody watches (or always), and tells every client."""

    def __init__(
        self,
        etcd: Source,
        prefix: bytes,
        read: Callable[[KeyValue], T | None],
        clock: Clock,
        *,
        always: bool,
        history_length: int = HISTORY_LENGTH,
    ) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._read = read
        self._clock = clock
        self._always = always
        self._feed: Feed[T] = Feed(history_length)
        self._subscriptions: set[Subscription[T]] = set()
        self._waiting = 0
        self.break_count = 0
        """Watches and listings that failed so far."""
        self._listed = asyncio.Event()
        """Whether there has been a listing; what it said is kept over an outage."""
        self._followed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._update_wanted()

    def quiet(self) -> Change[T]:
        """Returns a sign of life, for a client that has been told everything.

        Raises UnavailableError (ETCD_UNAVAILABLE) while nothing is followed: there may be news that nobody tells.
        """
        if not self.following:
            raise _away()
        return self._feed.quiet

    @property
    def following(self) -> bool:
        """Whether the prefix is followed now."""
        return self._followed.is_set()

    @property
    def watcher_count(self) -> int:
        """Clients that watch."""
        return len(self._subscriptions)

    @property
    def items(self) -> Mapping[str, T]:
        """Everything there is, as far as it is followed."""
        return self._feed.items

    async def run(self) -> None:
        """Follows for ever; ends when cancelled."""
        while True:
            await self._wanted.wait()
            await run_until_first(self._follow(), self._wait_idle())
            self._listed.clear()
            self._followed.clear()
            self._feed.reset(0, {})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps the prefix followed while a client waits or watches."""
        self._waiting += 1
        self._update_wanted()
        try:
            yield
        finally:
            self._waiting -= 1
            self._update_wanted()

    async def subscribe(self, start_revision: int, start_digest: int) -> Subscription[T]:
        """Opens a subscription; within `watching`, and to be given back to `unsubscribe`.

        While etcd is away a client that knows nothing (``start_revision`` 0) is told what there was last, and is then
        ended: it can go on with that. Any other goes on with what it knows, and waits here for news.

        Raises UnavailableError (ETCD_UNAVAILABLE) when there is no listing in time.
        """
        try:
            async with asyncio.timeout(LISTING_S):
                await (self._followed if start_revision else self._listed).wait()
        except TimeoutError:
            raise _away() from None
        subscription = Subscription(self._feed.open(start_revision, start_digest))
        if not self.following:
            subscription.end(_away())
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription[T]) -> None:
        """Closes a subscription."""
        self._subscriptions.discard(subscription)

    def end_all(self, error: BackhaulError) -> None:
        """Ends all subscriptions; the clients come back, here or elsewhere."""
        for subscription in self._subscriptions:
            subscription.end(error)

    async def _wait_idle(self) -> None:
        await self._idle.wait()

    def _update_wanted(self) -> None:
        wanted = self._always or self._waiting > 0
        (self._wanted.set if wanted else self._wanted.clear)()
        (self._idle.clear if wanted else self._idle.set)()

    async def _follow(self) -> None:
        first = True
        async with aclosing(follow(self._etcd, self._prefix, self._clock)) as news:
            async for item in news:
                match item:
                    case Outage():
                        self.break_count += 1
                        self._followed.clear()
                    case Update():
                        self._take(item, afresh=first or item.reset)
                        self._followed.set()
                        first = False

    def _take(self, update: Update, *, afresh: bool) -> None:
        values = {kv.key.decode(errors="replace"): self._read(kv) for kv in update.upserts}
        readable: Mapping[str, T] = {key: value for key, value in values.items() if value is not None}
        if afresh:
            # Revisions mean something else from here on: a client must not take them for a continuation.
            self.end_all(UnavailableError("HISTORY_LOST", "the history of etcd began anew: watch again"))
            self._feed.reset(update.revision, readable)
            self._listed.set()
            return
        gone = {key.decode(errors="replace") for key in update.removals}
        unreadable = values.keys() - readable.keys()
        change = self._feed.apply(update.revision, readable, frozenset(gone | unreadable))
        if change is not None:
            for subscription in self._subscriptions:
                subscription.offer(change)


def _away() -> UnavailableError:
    return UnavailableError("ETCD_UNAVAILABLE", "etcd does not answer this replica")
