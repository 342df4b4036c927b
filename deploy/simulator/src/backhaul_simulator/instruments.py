"""What the simulator itself sees of reads and retained sets: ground truth, taken from the memory and not from messages.

Nothing here changes what an engine does.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backhaul_simulator.transfer import Kind, ReadRequest

_MAX_SETS = 20_000


@dataclass(frozen=True, slots=True)
class _Retained:
    kind: Kind
    """How it is meant to be read."""
    block_ids: frozenset[int]


class Instruments:
    """Counts of one rank, as reader and as holder."""

    def __init__(self) -> None:
        self.started: Counter[Kind] = Counter()
        """Requests that wait for a read, or have."""
        self.completed: Counter[Kind] = Counter()
        """Requests that went on with what was read."""
        self.failed: Counter[Kind] = Counter()
        """Requests that ended because their read failed or was declined. The rest was aborted, or waits still."""
        self.served: Counter[Kind] = Counter()
        """Reads that other engines began here."""
        self.second_reads = 0
        """Reads of a set that a decode engine retains or retained, by another request than the first reader's."""
        self.reads_of_freed: Counter[Kind] = Counter()
        """Reads that copied a block which was not retained for them at that moment."""
        self.wrong_reads_used: Counter[Kind] = Counter()
        """Reads with content that the prompt's own tokens do not give, and that were not failed."""
        self.late_reads_failed = 0
        """Reads that got all their blocks and were failed all the same: the fence."""
        self.waits_for_retained = 0
        """Requests that could not be given blocks while finished turns retained some, each wait once."""
        self._lacking: set[str] = set()
        self._complete: set[str] = set()
        self._retained: dict[str, _Retained] = {}
        self._readers: OrderedDict[str, str] = OrderedDict()
        self._of_freed: OrderedDict[tuple[str, int], None] = OrderedDict()

    # As reader.

    def read_complete(self, req_id: str) -> None:
        """Notes that all blocks of a request's read have arrived."""
        self._complete.add(req_id)

    def read_used(self, req_id: str, kind: Kind, *, true: bool) -> None:
        """Counts a read that its request goes on with, and whether it is what the prompt's own tokens give."""
        self._complete.discard(req_id)
        self.completed[kind] += 1
        self.wrong_reads_used[kind] += not true

    def read_failed(self, req_id: str, kind: Kind) -> None:
        """Counts a read that fails its request."""
        self.failed[kind] += 1
        if req_id in self._complete:
            self._complete.discard(req_id)
            self.late_reads_failed += 1

    def read_unused(self, req_id: str) -> None:
        """Forgets a read whose request was aborted."""
        self._complete.discard(req_id)

    # As holder.

    def retained(self, set_id: str, kind: Kind, block_ids: Sequence[int]) -> None:
        """Notes blocks that the engine keeps for a reader."""
        self._retained[set_id] = _Retained(kind, frozenset(block_ids))

    def released(self, set_id: str) -> None:
        """Notes that the engine keeps them no longer."""
        self._retained.pop(set_id, None)

    def lacks_blocks(self, req_id: str) -> None:
        """Counts a request that waits for blocks, if retained ones are among those that others have."""
        if req_id in self._lacking or not any(kept.kind == "claimed" for kept in self._retained.values()):
            return
        self._lacking.add(req_id)
        self.waits_for_retained += 1

    def has_blocks(self, req_id: str) -> None:
        """Notes that a request waits no more."""
        self._lacking.discard(req_id)

    def read_started(self, read: ReadRequest) -> None:
        """Counts a read that arrives; tells when its set was read before."""
        self.served[read.kind] += 1
        if read.kind != "claimed":
            return
        first = self._readers.setdefault(read.set_id, read.reader)
        if first != read.reader:
            self.second_reads += 1
        if len(self._readers) > _MAX_SETS:
            self._readers.popitem(last=False)

    def block_copied(self, read: ReadRequest, block_id: int) -> None:
        """Looks whether a copied block was retained for this set, when it was copied."""
        kept = self._retained.get(read.set_id)
        if kept is not None and block_id in kept.block_ids:
            return
        key = (read.reader, read.read_id)
        if key not in self._of_freed:
            self._of_freed[key] = None
            self.reads_of_freed[read.kind] += 1
            if len(self._of_freed) > _MAX_SETS:
                self._of_freed.popitem(last=False)

    def kind_of_set(self, set_id: str) -> Kind | None:
        """Returns how a retained set is meant to be read; None when it is not retained."""
        kept = self._retained.get(set_id)
        return kept.kind if kept is not None else None

    def ledger(self, leases: Sequence[str]) -> dict[str, Any]:
        """Returns everything, for JSON. ``leases`` are the requests with a deadline."""
        kinds: tuple[Kind, Kind] = ("claimed", "handoff")
        blocks = {kind: set[int]() for kind in kinds}
        sets: Counter[Kind] = Counter()
        for kept in self._retained.values():
            sets[kept.kind] += 1
            blocks[kept.kind] |= kept.block_ids
        leased = Counter(self.kind_of_set(set_id) for set_id in leases)
        return {
            "reads": {
                kind: {
                    "started": self.started[kind],
                    "completed": self.completed[kind],
                    "failed": self.failed[kind],
                    "served": self.served[kind],
                    "of_freed": self.reads_of_freed[kind],
                    "wrong_used": self.wrong_reads_used[kind],
                }
                for kind in kinds
            },
            "second_reads": self.second_reads,
            "reads_of_freed": self.reads_of_freed.total(),
            "wrong_reads_used": self.wrong_reads_used.total(),
            "late_reads_failed": self.late_reads_failed,
            "waits_for_retained": self.waits_for_retained,
            "retained": {
                kind: {"sets": sets[kind], "blocks": len(blocks[kind]), "leases": leased[kind]} for kind in kinds
            },
            "pinned": sum(set_id not in leases for set_id in self._retained) if self._retained else 0,
        }
