"""Which blocks of an engine sets pin: a block counts once, however many sets hold it.

Each block has the number of its holders, and their slots combined by exclusive or: where one is left, that is its slot.
So what each set holds alone is always known, and a change costs as much as the set has blocks, whatever else there is.
"""

from array import array
from collections.abc import Iterable


class Pins:
    """The blocks of one engine and the sets that hold them."""

    def __init__(self, block_count: int) -> None:
        """Blocks are numbered from 0; what has another number is no block of this engine and counts nowhere."""
        self._holder_counts = array("I", bytes(4 * block_count))
        self._holders = array("I", bytes(4 * block_count))
        self._slots: dict[str, int] = {}
        self._alone: list[int] = []
        """By slot: blocks that nobody else holds."""
        self._free_slots: list[int] = []
        self.block_count = 0
        """Blocks that are held, each counted once."""

    def __contains__(self, set_id: str) -> bool:
        return set_id in self._slots

    def alone(self, set_id: str) -> int:
        """Returns how many blocks only this set holds: what would be free without it. Raises KeyError."""
        return self._alone[self._slots[set_id]]

    def add(self, set_id: str, block_ids: Iterable[int]) -> None:
        """Notes that a set, which is not here yet, holds blocks."""
        slot = self._free_slots.pop() if self._free_slots else len(self._alone)
        if slot == len(self._alone):
            self._alone.append(0)
        self._slots[set_id] = slot
        counts, holders, alone = self._holder_counts, self._holders, self._alone
        for block in self._known(block_ids):
            count = counts[block]
            if not count:
                alone[slot] += 1
                self.block_count += 1
            elif count == 1:
                alone[holders[block]] -= 1
            counts[block] = count + 1
            holders[block] ^= slot

    def remove(self, set_id: str, block_ids: Iterable[int]) -> None:
        """Notes that a set holds nothing any more; the blocks are those that it came with. Raises KeyError."""
        slot = self._slots.pop(set_id)
        counts, holders, alone = self._holder_counts, self._holders, self._alone
        for block in self._known(block_ids):
            count = counts[block] - 1
            counts[block] = count
            holders[block] ^= slot
            if not count:
                self.block_count -= 1
            elif count == 1:
                alone[holders[block]] += 1
        alone[slot] = 0
        self._free_slots.append(slot)

    def _known(self, block_ids: Iterable[int]) -> set[int]:
        end = len(self._holder_counts)
        return {block for block in block_ids if 0 <= block < end}
