"""What one decode engine retains, and what its agent has still to be told.

The scheduler writes, the link's thread reads; one lock guards both, held for no longer than a dictionary copy. While no
agent is connected nothing is queued: the next connection starts with a replay of all records.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from backhaul_connector.wire import (
    BlockSetReport,
    Deadlines,
    Freed,
    FromConnector,
    Identity,
    Memory,
    Replayed,
    Retained,
)

MAX_QUEUED = 10_000
"""Messages that may wait for a slow agent, if nothing else is set. One more and the queue is dropped: the link
reconnects and replays."""


class Ledger:
    """Records of the retained sets, and the queue of messages about them.

    ``wake`` is called (under no lock) whenever there is something to send; it must not block.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None, max_queued: int = MAX_QUEUED) -> None:
        self._wake = wake
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._sets: dict[str, BlockSetReport] = {}
        self._queue: deque[FromConnector] = deque()
        self._put_count = self._taken_count = 0
        """Messages that this session's queue was given, and gave."""
        self._memory: Memory | None = None
        """The session's latest figures."""
        self._memory_after = 0
        """How many messages must be taken before they are true."""
        self._memory_due = False
        self._identity: Identity | None = None
        self._connected = False
        self._overflowed = False
        self.dropped_count = 0
        """Messages dropped so far because the queue was full or the agent away."""
        self._lease_counts: dict[int, int] = {}

    def retained(self, report: BlockSetReport) -> None:
        """Records a set and reports it."""
        with self._lock:
            self._sets[report.set_id] = report
            self._put(Retained(set=report))
        self._wake()

    def freed(self, set_ids: Iterable[str]) -> None:
        """Forgets sets and reports them; ids that are not recorded are not ours and are left out."""
        with self._lock:
            gone = [set_id for set_id in set_ids if self._sets.pop(set_id, None) is not None]
            if gone:
                self._put(Freed(set_ids=gone))
        if gone:
            self._wake()

    def deadlines(self, deadlines: Mapping[str, float]) -> None:
        """Takes the engine's own deadlines over and reports those of recorded sets that changed."""
        with self._lock:
            changed = {
                set_id: deadline
                for set_id, deadline in deadlines.items()
                if (known := self._sets.get(set_id)) is not None and known.deadline != deadline
            }
            for set_id, deadline in changed.items():
                self._sets[set_id] = msgspec.structs.replace(self._sets[set_id], deadline=deadline)
            if changed:
                self._put(Deadlines(deadlines=changed))
        if changed:
            self._wake()

    def leases(self, counts: Mapping[int, int]) -> None:
        """Takes over how many leases ranks have: those of recorded sets, and others'."""
        with self._lock:
            self._lease_counts.update(counts)

    @property
    def foreign_count(self) -> int:
        """Leases that are no recorded set's: hand-offs, and what requests without a label left."""
        with self._lock:
            return max(0, max(self._lease_counts.values(), default=0) - len(self._sets))

    def mark(self, set_id: str, *, claimed: bool) -> None:
        """Notes that the agent granted a set, or took the grant back."""
        with self._lock:
            if (known := self._sets.get(set_id)) is not None:
                self._sets[set_id] = msgspec.structs.replace(known, claimed=claimed)

    def memory(self, memory: Memory) -> None:
        """Takes over how full the engine is, in place of figures that were not taken yet.

        They come after everything that was queued before, and never while nothing is retained. The same figures are
        reported again only after something else.
        """
        with self._lock:
            if memory == self._memory and self._put_count == self._memory_after:
                return
            self._memory, self._memory_after, self._memory_due = memory, self._put_count, True
            wanted = self._connected and bool(self._sets)
        if wanted:
            self._wake()

    def identify(self, identity: Identity) -> None:
        """Reports what became of the weights digest, on this session and at the start of each later one."""
        with self._lock:
            self._identity = identity
            self._put(identity)
        self._wake()

    def connect(self) -> Iterator[FromConnector]:
        """Starts a session: returns the replay of what is now, after which `take` gives what happens from now on."""
        with self._lock:
            self._queue.clear()
            self._connected, self._overflowed = True, False
            self._put_count = self._taken_count = self._memory_after = 0
            self._memory, self._memory_due = None, False
            sets = list(self._sets.values())
            first = [self._identity] if self._identity is not None else []
        # Made when they are taken: thousands at once would hold the interpreter for milliseconds.
        retained = (Retained(set=report, replayed=True) for report in sets)
        return itertools.chain(first, retained, [Replayed(set_count=len(sets))])

    def disconnect(self) -> None:
        """Ends a session: nothing is queued until the next one."""
        with self._lock:
            self._connected = self._overflowed = False
            self.dropped_count += len(self._queue)
            self._queue.clear()

    def take(self) -> FromConnector | None:
        """Takes the oldest message off the queue, or the latest memory figures; None when there is nothing new.

        Raises BufferError when messages had to be dropped since `connect`: only a new session makes the agent right.
        """
        with self._lock:
            if self._overflowed:
                raise BufferError("the agent was too slow: messages were dropped")
            if self._memory_due and self._sets and self._taken_count >= self._memory_after:
                self._memory_due = False
                return self._memory
            if not self._queue:
                return None
            self._taken_count += 1
            return self._queue.popleft()

    def _put(self, message: FromConnector) -> None:
        if self._connected and len(self._queue) < self._max_queued:
            self._queue.append(message)
            self._put_count += 1
            return
        self.dropped_count += 1
        self._overflowed = self._connected
