"""The content of a watched prefix with its recent changes, so that any number of clients can start or resume.

A client resumes from revision S when every change after S is still in the history; otherwise it gets a snapshot. When
etcd was restored or another cluster answers, a new history starts.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """What changed at ``revision``; without changes it is a sign of life."""

    revision: int
    upserts: Mapping[str, T]
    removals: Mapping[str, T]
    """What was removed, as it was last."""


@dataclass(frozen=True, slots=True)
class Opening(Generic[T]):
    """How a stream starts."""

    revision: int
    snapshot: Mapping[str, T] | None
    """None when the stream resumes."""
    missed: tuple[Change[T], ...] = ()
    """Changes since the client's revision, oldest first."""


class Feed(Generic[T]):
    """Items by id at one revision."""

    def __init__(self, history_length: int) -> None:
        self._items: dict[str, T] = {}
        self._history: deque[Change[T]] = deque(maxlen=history_length)
        # Resuming works from this revision on.
        self._floor = 0
        self.revision = 0

    @property
    def items(self) -> Mapping[str, T]:
        """Everything there is now."""
        return self._items

    def reset(self, revision: int, items: Mapping[str, T]) -> None:
        """Starts a new history."""
        self._items = dict(items)
        self._history.clear()
        self._floor = self.revision = revision

    def apply(self, revision: int, upserts: Mapping[str, T], removed: frozenset[str]) -> Change[T] | None:
        """Takes news and returns the change; None when nothing changed."""
        removals = {item: self._items[item] for item in removed if item in self._items}
        news = {item: value for item, value in upserts.items() if self._items.get(item) != value}
        self.revision = max(self.revision, revision)
        if not news and not removals:
            return None
        change = Change(self.revision, news, removals)
        self._remember(change)
        self._items.update(news)
        for item in removals:
            del self._items[item]
        return change

    def open(self, start_revision: int) -> Opening[T]:
        """Returns how a client that has seen ``start_revision`` (0: nothing) starts."""
        if start_revision == 0 or not self._floor <= start_revision <= self.revision:
            return Opening(self.revision, dict(self._items))
        missed = tuple(change for change in self._history if change.revision > start_revision)
        return Opening(start_revision, None, missed)

    def _remember(self, change: Change[T]) -> None:
        if len(self._history) == self._history.maxlen:
            self._floor = self._history[0].revision
        self._history.append(change)
