"""A prefix of the key space, kept up to date: list at R, watch from R+1, and after any doubt list again.

The consumer sees differences only. Doubt is a compaction, a broken or silent watch, or another endpoint; listing anew
also covers an etcd that was restored from an old snapshot, whose revisions went backwards.
"""

import random
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import AbortedError, BackhaulError
from backhaul_common.etcd.client import Listing, WatchBatch
from backhaul_common.etcd.ops import KeyValue

_log = structlog.get_logger(__name__)

_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 2.0


class Source(Protocol):
    """Where the keys come from."""

    async def list_prefix(self, prefix: bytes) -> Listing:
        """Reads all keys of a prefix as of one revision."""
        ...

    def watch(self, prefix: bytes, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yields changes from a revision on."""
        ...


@dataclass(frozen=True, slots=True)
class Update:
    """What changed, up to ``revision``; without changes it is a sign of life."""

    revision: int
    upserts: tuple[KeyValue, ...] = ()
    removals: tuple[bytes, ...] = ()
    listed: bool = False
    """Whether it comes from a listing."""
    reset: bool = False
    """Whether this is another history than before: revisions went backwards, or another cluster answers."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The keys cannot be followed at the moment; the next update comes from a listing."""

    error: BackhaulError


class Following:
    """The state of one followed prefix; turns listings and batches into differences."""

    def __init__(self) -> None:
        # Hash of each key as it was last; a restored store counts the same revisions again.
        self._seen: dict[bytes, int] = {}
        self._revision = 0
        self._cluster_id = 0

    def listed(self, listing: Listing) -> Update:
        """Takes a full listing and returns how it differs from what was known."""
        items = {item.key: item for item in listing.items}
        reset = listing.revision < self._revision or self._cluster_id not in (0, listing.cluster_id)
        upserts = [item for key, item in items.items() if reset or self._seen.get(key) != hash(item)]
        removals = [key for key in self._seen if key not in items]
        self._seen = {key: hash(item) for key, item in items.items()}
        self._revision = listing.revision
        self._cluster_id = listing.cluster_id
        return Update(listing.revision, tuple(upserts), tuple(removals), listed=True, reset=reset)

    def changed(self, batch: WatchBatch) -> Update:
        """Takes a batch and returns it without what is not news.

        Raises AbortedError (ETCD_HISTORY) when it comes from another history than the listing: etcd accepts a watch
        from a revision that it has yet to reach.
        """
        if batch.cluster_id != self._cluster_id or batch.store_revision < self._revision:
            raise AbortedError("ETCD_HISTORY", "the watch came up on another history than the listing")
        if not batch.upserts and not batch.removals:
            # A progress answer may run ahead of events that are still on their way (etcd-io/etcd#15220).
            return Update(self._revision)
        removals = tuple(_known(batch.removals, self._seen))
        self._seen.update((item.key, hash(item)) for item in batch.upserts)
        for key in removals:
            del self._seen[key]
        self._revision = max(self._revision, batch.revision)
        return Update(self._revision, batch.upserts, removals)


def _known(keys: Iterable[bytes], seen: dict[bytes, int]) -> list[bytes]:
    return [key for key in keys if key in seen]


async def follow(
    source: Source, prefix: bytes, clock: Clock, jitter: Callable[[], float] = random.random
) -> AsyncGenerator[Update | Outage, None]:
    """Yields the content of ``prefix``, then every difference, for ever. Close it (``contextlib.aclosing``) to end."""
    following = Following()
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            update = following.listed(await source.list_prefix(prefix))
            yield update
            async with aclosing(source.watch(prefix, update.revision + 1)) as batches:
                async for batch in batches:
                    pause_s = _FIRST_PAUSE_S
                    yield following.changed(batch)
        except BackhaulError as error:
            _log.info("etcd watch interrupted", prefix=prefix.decode(errors="replace"), reason=error.reason)
            yield Outage(error)
        await clock.sleep(pause_s * (0.5 + jitter()))
        pause_s = min(pause_s * 2, _LAST_PAUSE_S)
