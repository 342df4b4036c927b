"""How many blocks of an engine its sets may pin, and how many they do pin."""

from collections.abc import Collection
from dataclasses import dataclass

from backhaul_node_agent.core.retention.pins import Pins


@dataclass(frozen=True, slots=True)
class Memory:
    """An engine's blocks at one moment, as its connector saw them."""

    block_count: int
    """All that there are."""
    free_count: int
    """Those that a request can have at once."""
    waiting_count: int
    """Those that requests asked for and did not get."""


def limit(memory: Memory, pinned: int, *, share: float, mark: float) -> int:
    """Returns how many blocks sets may pin now, `pinned` of them being pinned.

    At most `share` of all; fewer when what runs, waits and is retained together would fill more than `mark` of all. The
    rest is always free, so that a request that arrives need not wait for a release.
    """
    running = max(0, memory.block_count - memory.free_count - pinned)
    room = int(memory.block_count * mark) - running - memory.waiting_count
    return max(0, min(int(memory.block_count * share), room))


class EngineBudget:
    """What the sets of one engine pin, and how much of it is too much."""

    def __init__(self, block_count: int, *, share: float, mark: float) -> None:
        """See `limit`."""
        self._block_count = block_count
        self._share = share
        self._mark = mark
        self._pinned = Pins(block_count)
        self._staying = Pins(block_count)
        """Of sets whose release has not begun."""
        self._memory: Memory | None = None
        """As of the connector's last figures, and what was freed since."""

    def alone(self, set_id: str) -> int:
        """Returns how many blocks the release of a set would free, of those that stay. Raises KeyError."""
        return self._staying.alone(set_id)

    def retain(self, set_id: str, block_ids: Collection[int]) -> None:
        """Takes a set in, unless it is here."""
        for pins in (self._pinned, self._staying):
            if set_id not in pins:
                pins.add(set_id, block_ids)

    def release(self, set_id: str, block_ids: Collection[int]) -> None:
        """Notes that the release of a set has begun: it pins its blocks still, but not for long."""
        if set_id in self._staying:
            self._staying.remove(set_id, block_ids)

    def freed(self, set_id: str, block_ids: Collection[int]) -> None:
        """Notes that a set is gone."""
        self.release(set_id, block_ids)
        before = self._pinned.block_count
        if set_id in self._pinned:
            self._pinned.remove(set_id, block_ids)
        if self._memory is not None:
            # Until the next figures, so that what has become free does not pass for what runs.
            free = self._memory.free_count + before - self._pinned.block_count
            self._memory = Memory(self._block_count, free, self._memory.waiting_count)

    def saw(self, *, free_count: int, waiting_count: int) -> None:
        """Takes over what the connector saw after all that it reported before."""
        self._memory = Memory(self._block_count, free_count, waiting_count)

    @property
    def free_count(self) -> int | None:
        """Blocks that a request can have at once; None before there are figures."""
        return self._memory.free_count if self._memory is not None else None

    @property
    def pinned_count(self) -> int:
        """Blocks that sets pin, those whose release has begun included."""
        return self._pinned.block_count

    @property
    def limit(self) -> int:
        """Blocks that sets may pin now. Before there are figures, nothing counts as running."""
        memory = self._memory or Memory(self._block_count, self._block_count - self._pinned.block_count, 0)
        return limit(memory, self._pinned.block_count, share=self._share, mark=self._mark)

    @property
    def surplus(self) -> int:
        """Blocks that sets hold beyond the limit."""
        return max(0, self._staying.block_count - self.limit)
