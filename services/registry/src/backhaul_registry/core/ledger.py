"""Which pointer of one publish stream lives under which lease.

etcd deletes the keys of a lease in one step, so a lease carries a bounded number of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from backhaul_registry.core.model import Pointer, PointerId

MAX_KEYS_PER_LEASE = 10_000

MAX_OPS = 100
"""Operations of one etcd transaction; etcd's own limit is 128 by default (server/embed/config.go, DefaultMaxTxnOps)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Upsert:
    """Write a pointer under a lease."""

    pointer: Pointer
    lease_id: int


@dataclass(frozen=True, slots=True)
class Removal:
    """Remove a pointer."""

    pointer: PointerId


Write = Upsert | Removal


class Ledger:
    """The leases of one stream and what each carries."""

    def __init__(self, max_keys_per_lease: int = MAX_KEYS_PER_LEASE) -> None:
        self._max_keys = max_keys_per_lease
        # Many streams of many pointers: each is kept once.
        self._lease_of: dict[PointerId, int] = {}
        self._counts: dict[int, int] = {}
        # Leases that are not full.
        self._roomy: dict[int, None] = {}

    @property
    def leases(self) -> tuple[int, ...]:
        """All leases, oldest first."""
        return tuple(self._counts)

    def keys(self, lease_id: int) -> tuple[PointerId, ...]:
        """What a lease carries."""
        return tuple(pointer for pointer, lease in self._lease_of.items() if lease == lease_id)

    def add_lease(self, lease_id: int) -> None:
        """Takes a new, empty lease."""
        self._counts[lease_id] = 0
        self._roomy[lease_id] = None

    def missing_leases(self, upserts: Sequence[Pointer]) -> int:
        """Returns how many leases must be added before `place` can place ``upserts``."""
        room = sum(self._max_keys - count for count in self._counts.values())
        if len(upserts) <= room:
            return 0
        new_count = sum(pointer not in self._lease_of for pointer in {pointer.id for pointer in upserts})
        return max(0, -(-(new_count - room) // self._max_keys))

    def place(self, upserts: Sequence[Pointer], removals: Sequence[PointerId]) -> list[Write]:
        """Assigns pointers to leases and returns what to write, at most once per pointer: the last word counts."""
        writes: dict[PointerId, Write] = {}
        for pointer in upserts:
            pointer_id = pointer.id
            writes[pointer_id] = Upsert(pointer, self._lease_for(pointer_id))
        for removed in removals:
            self._forget(removed)
            writes[removed] = Removal(removed)
        return list(writes.values())

    def _lease_for(self, pointer: PointerId) -> int:
        lease_id = self._lease_of.get(pointer)
        if lease_id is None:
            lease_id = next(iter(self._roomy))
            self._lease_of[pointer] = lease_id
            self._counts[lease_id] += 1
            if self._counts[lease_id] == self._max_keys:
                del self._roomy[lease_id]
        return lease_id

    def _forget(self, pointer: PointerId) -> None:
        lease_id = self._lease_of.pop(pointer, None)
        if lease_id is not None:
            self._counts[lease_id] -= 1
            self._roomy[lease_id] = None


def chunks(items: Sequence[T], size: int = MAX_OPS) -> Iterator[Sequence[T]]:
    """Cuts a sequence into pieces of at most ``size``."""
    return (items[start : start + size] for start in range(0, len(items), size))
