"""The content of a watched prefix with its recent changes, so that any number of clients can start or resume.

A client resumes from revision S when every change after S is still in the history, and when it knows what there was at
S; otherwise it gets a snapshot. The revision alone does not tell: after a restore from an old snapshot etcd counts the
same numbers again, and a replica that was cut off from etcd has not seen every step on the way. So everything carries a
digest of the whole content, which is the same in every replica.
"""

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """What changed at ``revision``; without changes it is a sign of life."""

    revision: int
    upserts: Mapping[str, T]
    removals: Mapping[str, T]
    """What was removed, as it was last."""
    digest: int
    """Digest of everything there is at ``revision``."""


@dataclass(frozen=True, slots=True)
class Opening(Generic[T]):
    """How a stream starts."""

    revision: int
    digest: int
    snapshot: Mapping[str, T] | None
    """None when the stream resumes."""
    missed: tuple[Change[T], ...] = ()
    """Changes since the client's revision, oldest first."""


class Feed(Generic[T]):
    """Items by id at one revision."""

    def __init__(self, history_length: int) -> None:
        self._items: dict[str, T] = {}
        self._history: deque[Change[T]] = deque(maxlen=history_length)
        self._digest = _EMPTY
        # Resuming works from this revision on; with what there was then.
        self._floor, self._floor_digest = 0, _EMPTY
        self.revision = 0

    @property
    def items(self) -> Mapping[str, T]:
        """Everything there is now."""
        return self._items

    @property
    def quiet(self) -> Change[T]:
        """A sign of life at the present revision."""
        return Change(self.revision, {}, {}, self._digest)

    def reset(self, revision: int, items: Mapping[str, T]) -> None:
        """Starts a new history."""
        self._items = dict(items)
        self._history.clear()
        self._digest = self._floor_digest = _EMPTY ^ _digest(items)
        self._floor = self.revision = revision

    def apply(self, revision: int, upserts: Mapping[str, T], removed: frozenset[str]) -> Change[T] | None:
        """Takes news and returns the change; None when nothing changed."""
        removals = {item: self._items[item] for item in removed if item in self._items}
        news = {item: value for item, value in upserts.items() if self._items.get(item) != value}
        self.revision = max(self.revision, revision)
        if not news and not removals:
            return None
        replaced = {item: self._items[item] for item in news if item in self._items}
        self._digest ^= _digest(replaced) ^ _digest(removals) ^ _digest(news)
        change = Change(self.revision, news, removals, self._digest)
        self._remember(change)
        self._items.update(news)
        for item in removals:
            del self._items[item]
        return change

    def open(self, start_revision: int, start_digest: int) -> Opening[T]:
        """Returns how a client starts that knows what there was at ``start_revision`` (0: nothing)."""
        if start_revision == 0 or self._digest_at(start_revision) != start_digest:
            return Opening(self.revision, self._digest, dict(self._items))
        missed = tuple(change for change in self._history if change.revision > start_revision)
        return Opening(start_revision, start_digest, None, missed)

    def _digest_at(self, revision: int) -> int | None:
        """Returns the digest of what there was at a revision; None outside the history."""
        if not self._floor <= revision <= self.revision:
            return None
        earlier = (change.digest for change in reversed(self._history) if change.revision <= revision)
        return next(earlier, self._floor_digest)

    def _remember(self, change: Change[T]) -> None:
        if len(self._history) == self._history.maxlen:
            self._floor, self._floor_digest = self._history[0].revision, self._history[0].digest
        self._history.append(change)


def _digest(items: Mapping[str, Any]) -> int:
    """Returns a digest of 64 bits that does not depend on order, and that can be taken back: XOR over the items."""
    total = 0
    for item, value in items.items():
        one = hashlib.blake2b(f"{item}\0{value!r}".encode(), digest_size=8).digest()
        total ^= int.from_bytes(one)
    return total


_EMPTY = _digest({"": None})
"""Digest of nothing; not 0, which is what a client says that knows none."""
