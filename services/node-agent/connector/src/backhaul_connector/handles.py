"""Which handles a prefill engine may still use: none twice, and none whose deadline is near. Pure: no I/O, no clock."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

USED = "used"
MAX_USED = 4096
"""Handles remembered at most; far more than can be claimed within a claim's time."""
START_MARGIN_S = 5.0
"""vLLM declines a read that would start later than this before the deadline (``nixl/pull_worker.py``,
``_KV_BLOCKS_EXPIRY_SAFETY_MARGIN``), which fails the request; refusing the handle first makes it cold instead."""


class Clocks(Protocol):
    """What is asked of `RemoteClocks`."""

    def watch(self, engine_id: str, host: str, port: int) -> None: ...

    def jumped(self, engine_id: str) -> bool: ...

    def remaining(self, engine_id: str, deadline: float, now: float) -> float | None: ...


class Handles:
    """Remembers the handles that were let through, the newest `max_used` of them."""

    def __init__(self, clocks: Clocks, max_used: int = MAX_USED) -> None:
        self._clocks = clocks
        self._max_used = max_used
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()

    def refuses(self, params: Mapping[str, Any], now: float) -> str:
        """Says why a proved handle is not to be used ``now`` (own clock); else notes that it is, and says nothing."""
        engine_id, deadline = params["remote_engine_id"], params["remote_blocks_expiry_time"]
        handle = (engine_id, params["remote_request_id"])
        if handle in self._used:
            return USED
        self._clocks.watch(engine_id, params["remote_host"], params["remote_port"])
        if self._clocks.jumped(engine_id):
            return "clock_jumped"
        remaining = self._clocks.remaining(engine_id, deadline, now)
        if remaining is not None and remaining <= START_MARGIN_S:
            return "expired"
        self._used[handle] = None
        if len(self._used) > self._max_used:
            self._used.popitem(last=False)
        return ""
