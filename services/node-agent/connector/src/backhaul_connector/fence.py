"""The end fence: a read that completes after its deadline is a failed read.

vLLM looks at the deadline once, before a read starts (``nixl/pull_worker.py``, ``_is_turn2_read_expired``). A read that
is slow, or a process that was frozen meanwhile, may finish when the engine that it reads from has long given the blocks
to someone else. Both kinds of reads have one: a claimed read of a decode engine's blocks, and a hand-off of a prefill
engine with Backhaul's connector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

HOLD_S = 3.0
"""Longest wait for an engine's clock; measuring one takes two seconds at most."""


class Clocks(Protocol):
    """What the fence asks of `RemoteClocks`."""

    def watch(self, engine_id: str, host: str, port: int) -> None: ...

    def remaining(self, engine_id: str, deadline: float, now: float) -> float | None: ...

    def measuring(self, engine_id: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Read:
    engine_id: str
    deadline: float
    block_ids: Sequence[int]


class EndFence:
    """Follows the reads with a deadline of one worker."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._reads: dict[str, _Read] = {}
        self._completed: dict[str, float] = {}
        """When completed reads that are not judged yet were first seen."""
        self._late_blocks: set[int] = set()

    def started(self, reqs_to_recv: Mapping[str, Any]) -> None:
        """Notes the reads that a scheduler step starts (``NixlConnectorMetadata.reqs_to_recv``).

        A hand-off of a prefill engine with vLLM's own connector carries no deadline, and is not followed.
        """
        for req_id, meta in reqs_to_recv.items():
            remote = meta.remote
            if remote is None or remote.blocks_expiry_time is None or not any(meta.local_block_ids):
                continue
            self._clocks.watch(remote.engine_id, remote.host, remote.port)
            blocks = meta.local_block_ids[0] if len(meta.local_block_ids) == 1 else ()
            self._reads[req_id] = _Read(remote.engine_id, remote.blocks_expiry_time, tuple(blocks))

    def judge(self, completed: set[str], failed: set[str], now: float) -> tuple[set[str], set[str]]:
        """Returns which reads are over by now, and which of them have failed, as vLLM's worker shall report them.

        A read with a deadline fails when it completed too late, or came from an engine whose clock is not known. While
        that clock is being measured for the first time the read is held back, `HOLD_S` at most: the first read from an
        engine is often faster than that. Completion is seen at the end of a scheduler step, and judged later still, so
        that the answer errs to the safe side.
        """
        for req_id in completed & self._reads.keys():
            self._completed.setdefault(req_id, now)
        over, bad = completed - self._completed.keys(), set(failed)
        for req_id, since in list(self._completed.items()):
            read = self._reads[req_id]
            remaining = self._clocks.remaining(read.engine_id, read.deadline, now)
            unknown = remaining is None and self._clocks.measuring(read.engine_id)
            if unknown and req_id not in failed and now - since < HOLD_S:
                continue
            del self._reads[req_id], self._completed[req_id]
            over.add(req_id)
            in_time = remaining is not None and remaining > 0
            if req_id not in failed and not in_time:
                bad.add(req_id)
                self._late_blocks.update(read.block_ids)
        return over, bad

    def take_late_blocks(self) -> set[int]:
        """Returns, once, the blocks of late reads: they must not be cached.

        Empty for models with several cache groups, where vLLM goes by the request instead
        (``v1/core/sched/scheduler.py``, ``_handle_invalid_blocks``).
        """
        blocks, self._late_blocks = self._late_blocks, set()
        return blocks
