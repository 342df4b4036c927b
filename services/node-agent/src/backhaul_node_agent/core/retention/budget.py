"""How many blocks of an engine its sets may pin, and how many they do pin."""

from dataclasses import dataclass


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
