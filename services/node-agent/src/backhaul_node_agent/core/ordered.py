"""Names in the order of what each one has: an instant at which it is due, what it is worth.

Only what is asked for is looked at, however many names there are. A name that changes or goes leaves its former entry
in the heap, where it counts no more; once such entries are more than half they are swept.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Any)
"""What can be compared with its like."""

_FEW = 64
"""Entries that are not worth sweeping."""


class Ordered(Generic[Key]):
    """Each name has one key; the least come first."""

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}
        self._heap: list[tuple[Key, str]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, name: str, key: Key) -> None:
        """Gives a name a key, in place of the one that it has."""
        if self._keys.get(name) == key:
            return
        self._keys[name] = key
        heappush(self._heap, (key, name))
        if len(self._heap) > _FEW + 2 * len(self._keys):
            self._heap = [(key, name) for name, key in self._keys.items()]
            heapify(self._heap)

    def drop(self, name: str) -> None:
        """Forgets a name, if it is here."""
        self._keys.pop(name, None)

    def until(self, end: Key) -> list[str]:
        """Returns the names whose keys are no greater than `end`, least first; they stay."""
        names = list(self._pop_until(end))
        for name in names:
            heappush(self._heap, (self._keys[name], name))
        return names

    def pop_least(self) -> str | None:
        """Takes out the name with the least key; None when there is none."""
        while self._heap:
            key, name = heappop(self._heap)
            if self._keys.get(name) == key:
                del self._keys[name]
                return name
        return None

    def _pop_until(self, end: Key) -> Iterator[str]:
        seen: set[str] = set()
        while self._heap and self._heap[0][0] <= end:
            key, name = heappop(self._heap)
            # A key that a name had, lost and was given again is in the heap twice.
            if self._keys.get(name) == key and name not in seen:
                seen.add(name)
                yield name
