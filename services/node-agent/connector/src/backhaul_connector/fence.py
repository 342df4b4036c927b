"""The end fence: a claimed read that completes after its deadline is a failed read.

vLLM looks at the deadline once, before a read starts (``nixl/pull_worker.py``, ``_is_turn2_read_expired``). A read that
is slow, or a process that was frozen meanwhile, may finish when the decode engine has long given the blocks to someone
else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Clocks(Protocol):
    """What the fence asks of `RemoteClocks`."""

    def watch(self, engine_id: str, host: str, port: int) -> None: ...

    def remaining(self, engine_id: str, deadline: float, now: float) -> float | None: ...


@dataclass(frozen=True, slots=True)
class _Read:
    engine_id: str
    deadline: float
    block_ids: Sequence[int]


class EndFence:
    """Follows the claimed reads of one worker."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._reads: dict[str, _Read] = {}
        self._late_blocks: set[int] = set()

    def started(self, reqs_to_recv: Mapping[str, Any]) -> None:
        """Notes the reads that a scheduler step starts (``NixlConnectorMetadata.reqs_to_recv``).

        Only claimed reads carry a deadline; hand-offs from prefill to decode have a lease instead.
        """
        for req_id, meta in reqs_to_recv.items():
            remote = meta.remote
            if remote is None or remote.blocks_expiry_time is None or not any(meta.local_block_ids):
                continue
            self._clocks.watch(remote.engine_id, remote.host, remote.port)
            blocks = meta.local_block_ids[0] if len(meta.local_block_ids) == 1 else ()
            self._reads[req_id] = _Read(remote.engine_id, remote.blocks_expiry_time, tuple(blocks))

    def late(self, completed: set[str], failed: set[str], now: float) -> set[str]:
        """Returns which completed reads came too late, or from an engine whose clock is not known.

        Completion is seen at the end of a scheduler step, so that the answer errs to the safe side.
        """
        late = set()
        for req_id in completed & self._reads.keys():
            read = self._reads.pop(req_id)
            remaining = self._clocks.remaining(read.engine_id, read.deadline, now)
            in_time = remaining is not None and remaining > 0
            if req_id not in failed and not in_time:
                late.add(req_id)
                self._late_blocks.update(read.block_ids)
        return late

    def take_late_blocks(self) -> set[int]:
        """Returns, once, the blocks of late reads: they must not be cached.

        Empty for models with several cache groups, where vLLM goes by the request instead
        (``v1/core/sched/scheduler.py``, ``_handle_invalid_blocks``).
        """
        blocks, self._late_blocks = self._late_blocks, set()
        return blocks
