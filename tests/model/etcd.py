"""What the registry keeps in etcd: the node's record and the pointers, each under a lease. It can go back in time."""

import itertools
from dataclasses import dataclass, field

from backhaul_node_agent.core.block_set import BlockSet

LEASE_TTL_S = 10.0
_SNAPSHOTS = 40


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where a router may look for a set."""

    key: str
    set_id: str
    engine_id: str


@dataclass(slots=True)
class State:
    """Everything that an old snapshot brings back."""

    leases: dict[int, float] = field(default_factory=dict)
    """Lease to the time of its end."""
    holder: tuple[str, int] | None = None
    """Session and lease of the node's record."""
    pointers: dict[Pointer, int] = field(default_factory=dict)
    """Pointer to its lease."""
    marks: dict[int, int] = field(default_factory=dict)
    """Batches written under each lease."""

    def copy(self) -> "State":
        """Returns a state that changes apart from this one."""
        return State(dict(self.leases), self.holder, dict(self.pointers), dict(self.marks))


class Etcd:
    """One store. Lease ids are never given twice, in whatever history."""

    def __init__(self) -> None:
        self.state = State()
        self.deaf = False
        """Whether pointers are not taken over: a stream that brings some ends."""
        self._ids = itertools.count(1)
        self._snapshots: list[State] = []

    # --- the node's record (backhaul_registry.core.membership)

    def join(self, session: str, now: float) -> int | None:
        """Takes the node's record under a new lease; None while another session has it."""
        holder = self.state.holder
        if holder is not None and holder[0] != session:
            return None
        if holder is not None:
            self.end_lease(holder[1])
        lease_id = self.grant(now)
        self.state.holder = (session, lease_id)
        return lease_id

    def keep(self, session: str, lease_id: int, now: float) -> bool:
        """Renews the lease of the node's record; False when it is lost."""
        if self.state.holder is None:
            self.state.holder = (session, lease_id)
        return self.state.holder[1] == lease_id and self.renew(lease_id, now)

    # --- leases and pointers

    def grant(self, now: float) -> int:
        """Makes a lease."""
        lease_id = next(self._ids)
        self.state.leases[lease_id] = now + LEASE_TTL_S
        return lease_id

    def renew(self, lease_id: int, now: float) -> bool:
        """Renews a lease; False when it is gone."""
        if lease_id not in self.state.leases:
            return False
        self.state.leases[lease_id] = now + LEASE_TTL_S
        return True

    def keep_pointers(self, lease_id: int, mark: int, now: float) -> bool:
        """Renews the lease of a stream's pointers; False when it is gone, or its last batches are."""
        return self.state.marks.get(lease_id, 0) == mark and self.renew(lease_id, now)

    def end_lease(self, lease_id: int) -> None:
        """Ends a lease with all that is under it."""
        self.state.leases.pop(lease_id, None)
        if self.state.holder is not None and self.state.holder[1] == lease_id:
            self.state.holder = None
        self.state.pointers = {pointer: lease for pointer, lease in self.state.pointers.items() if lease != lease_id}

    def write(self, engine_id: str, lease_id: int, upserts: list[BlockSet], removals: list[BlockSet]) -> bool:
        """Makes a batch durable; False when the lease is gone."""
        if self.deaf:
            self.end_lease(lease_id)
        if lease_id not in self.state.leases:
            return False
        self.state.marks[lease_id] = self.state.marks.get(lease_id, 0) + 1
        for block_set in upserts:
            self.state.pointers.update(dict.fromkeys(pointers_of(block_set, engine_id), lease_id))
        for block_set in removals:
            for pointer in pointers_of(block_set, engine_id):
                self.state.pointers.pop(pointer, None)
        return True

    # --- time

    def step(self, now: float) -> None:
        """Ends leases whose time is over, and keeps a snapshot."""
        for lease_id in [lease_id for lease_id, end in self.state.leases.items() if now >= end]:
            self.end_lease(lease_id)
        self._snapshots = [*self._snapshots[-_SNAPSHOTS:], self.state.copy()]

    def go_back(self, steps: int, now: float) -> None:
        """Comes up from an old snapshot, with all its leases at their full time."""
        self.state = self._snapshots[-min(steps, len(self._snapshots))].copy() if self._snapshots else State()
        self.state.leases = dict.fromkeys(self.state.leases, now + LEASE_TTL_S)


def pointers_of(block_set: BlockSet, engine_id: str) -> list[Pointer]:
    """Returns the pointers of a set."""
    return [Pointer(key, block_set.set_id, engine_id) for key in block_set.keys]
