"""Leases: until when an engine's worker keeps blocks for others (``nixl/base_worker.py``, ``nixl/pull_worker.py``).

Hand-offs to decode engines and the sets that decode engines retain are in one map, under their request ids alone.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

_log = logging.getLogger(__name__)


class Leases:
    """Deadlines in the worker's clock, and which requests the worker knows at all."""

    def __init__(self, extension_s: float) -> None:
        """``extension_s`` is how far from now a heartbeat moves a deadline."""
        self.deadlines: dict[str, float] = {}
        self._extension_s = extension_s
        self._known: set[str] = set()
        self._notices: defaultdict[str, int] = defaultdict(int)
        self._soonest = math.inf

    def batch(self, req_ids: Iterable[str]) -> None:
        """Notes requests that were part of a batch: only these can get a deadline."""
        self._known.update(req_ids)

    def drop(self, req_ids: Iterable[str]) -> None:
        """Forgets requests that retain nothing."""
        for req_id in req_ids:
            self._known.discard(req_id)
            assert req_id not in self.deadlines, f"{req_id} was aborted after its deadline was set"

    def send(self, deadlines: Mapping[str, float], scheduler_clock: float, now: float) -> None:
        """Takes deadlines in the scheduler's clock over, into the worker's.

        One of a request that was read already is left out; so is one of a request that was never in a batch, and the
        blocks of that stay pinned for ever.
        """
        for req_id, deadline in deadlines.items():
            if req_id in self._known:
                own = now + (deadline - scheduler_clock) if scheduler_clock else deadline
                self.deadlines[req_id] = own
                self._soonest = min(self._soonest, own)

    def notified(self, messages: Iterable[bytes], now: float) -> set[str]:
        """Takes notifications; returns the requests whose readers are all done (``_get_new_notifs``)."""
        done: set[str] = set()
        for raw in messages:
            message = raw.decode()
            if message.startswith("HB:"):
                self._extend(message[3:].split(","), now)
                continue
            req_id, consumers = message.rsplit(":", 1)
            if req_id not in self._known and req_id not in self.deadlines:
                _log.error("unrecognized request %s was read; its blocks may have expired", req_id)
                continue
            self._notices[req_id] += 1
            if self._notices[req_id] == int(consumers):
                self._forget(req_id)
                done.add(req_id)
        return done

    def expired(self, now: float) -> set[str]:
        """Ends the leases that are over and returns their requests (``_reap_expired_send_leases``)."""
        if now < self._soonest:
            return set()
        over = {req_id for req_id, deadline in self.deadlines.items() if now >= deadline}
        for req_id in over:
            self._forget(req_id)
        self._soonest = min(self.deadlines.values(), default=math.inf)
        return over

    def _extend(self, req_ids: Iterable[str], now: float) -> None:
        for req_id in req_ids:
            if req_id in self.deadlines:
                self.deadlines[req_id] = max(self.deadlines[req_id], now + self._extension_s)

    def _forget(self, req_id: str) -> None:
        self._known.remove(req_id)
        self._notices.pop(req_id, None)
        self.deadlines.pop(req_id, None)
