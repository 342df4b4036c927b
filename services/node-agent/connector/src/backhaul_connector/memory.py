"""How full an engine is: blocks that are free, and blocks that requests wait for.

The pool is public (``KVConnectorBase_V1.bind_gpu_block_pool``); who waits shows in the hooks. vLLM's scheduler
(``v1/core/sched/scheduler.py``, ``schedule``) asks for the first request that waits what can be read
(``get_num_new_matched_tokens``), tries to allocate, and on success says so (``update_state_after_alloc``); if not, it
asks for no further one and ends the step's plan (``build_connector_meta``). So who was asked for last and not allocated
by then waits for blocks, and whoever came and was never allocated is behind it; one that was asked for before was
passed over for another reason. Without chunked prefill a prompt that is longer than what is left of the step's tokens
ends the plan, too, before allocation is tried: it waits for the next step.
"""

import math
from typing import Protocol

from backhaul_connector.wire import Memory

INTERVAL_S = 0.02
"""Least time between two reports, unless requests begin to wait."""

_MAX_COUNT = 2**31 - 1


class BlockPool(Protocol):
    """The part of vLLM's block pool that is used (``v1/core/block_pool.py``)."""

    def get_num_free_blocks(self) -> int: ...


class MemoryWatcher:
    """Follows requests until they have blocks. Costs a dictionary access per hook."""

    def __init__(self, block_size: int, group_count: int, whole_prompt_tokens: float = math.inf) -> None:
        """Every cache group takes blocks of its own for the same tokens.

        ``whole_prompt_tokens`` are those that a step may compute where prompts are not cut into pieces.
        """
        self._block_size = block_size
        self._group_count = group_count
        self._pool: BlockPool | None = None
        self._needs: dict[str, int] = {}
        """Blocks that requests without any need, by request id."""
        self._needed = 0
        """Their sum."""
        self._whole_prompt_tokens = whole_prompt_tokens
        self._asked: tuple[str, int] | None = None
        """The last request of this step that could be given blocks, and the tokens that it would compute at once."""
        self.waits = False
        """Whether anybody waited for blocks when the last step was planned."""
        self._waited = False
        """The same when figures were returned last."""
        self._due = float("-inf")

    def bind(self, pool: BlockPool) -> None:
        """Takes the pool; without one there is nothing to report."""
        self._pool = pool

    def arrived(self, request_id: str, token_count: int) -> None:
        """Notes a request without blocks, new or preempted."""
        if request_id not in self._needs:
            self._needs[request_id] = -(-token_count // self._block_size) * self._group_count
            self._needed += self._needs[request_id]

    def asked(self, request_id: str, token_count: int, *, computed_now: int = 0) -> None:
        """Notes that blocks are about to be allocated for a request, of which a step computes so many tokens."""
        self.arrived(request_id, token_count)
        self._asked = request_id, computed_now

    def left(self, request_id: str) -> None:
        """Notes that a request has blocks, or does not want any more."""
        self._needed -= self._needs.pop(request_id, 0)
        if self._asked is not None and self._asked[0] == request_id:
            self._asked = None

    def stepped(self, now: float, *, planned: int = 0) -> Memory | None:
        """Returns what is to be reported when a step of so many tokens is planned; None when it is too early."""
        self.waits = self._asked is not None and planned + self._asked[1] <= self._whole_prompt_tokens
        waiting = min(self._needed, _MAX_COUNT) if self.waits else 0
        self._asked = None
        begins_to_wait = waiting > 0 and not self._waited
        if self._pool is None or (now < self._due and not begins_to_wait):
            return None
        self._waited, self._due = waiting > 0, now + INTERVAL_S
        return Memory(free_count=self._pool.get_num_free_blocks(), waiting_count=waiting)
