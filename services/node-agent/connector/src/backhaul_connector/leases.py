"""Deadlines of retained blocks, from the workers that hold them to the scheduler that reports them."""

from collections.abc import Mapping

_INTERVAL_S = 0.25


def earliest(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Merges the deadlines of two ranks by minimum: blocks are safe until the first rank frees them."""
    return {key: min(one.get(key, other.get(key, 0.0)), other.get(key, one.get(key, 0.0))) for key in {**one, **other}}


class LeaseWatcher:
    """Watches one worker's lease map for deadlines that heartbeats moved."""

    def __init__(self) -> None:
        self._offset = float("-inf")
        self._known: dict[str, float] = {}
        self._due = 0.0

    def stepped(self, scheduler_clock: float, now: float) -> None:
        """Notes the scheduler's clock of a step that arrives ``now``.

        The scheduler may run in another process, with another epoch. The difference holds the time that the step took
        to arrive, which makes deadlines early rather than late. Only the last one counts: neither one slow step nor the
        drift of the clocks adds up.
        """
        if scheduler_clock:
            self._offset = now - scheduler_clock

    def changed(self, leases: object, now: float) -> dict[str, float]:
        """Returns the deadlines that changed since the last call, in the scheduler's clock; looks four times a second.

        ``leases`` is the worker's private ``_reqs_to_send`` (``nixl/base_worker.py``: request id to deadline in the
        worker's clock). Anything but a mapping of floats gives nothing: then no renewal counts.
        """
        if now < self._due or not isinstance(leases, Mapping) or self._offset == float("-inf"):
            return {}
        self._due = now + _INTERVAL_S
        current = {
            req_id: deadline
            for req_id, deadline in leases.items()
            if isinstance(req_id, str) and isinstance(deadline, float)
        }
        moved = {
            req_id: deadline - self._offset
            for req_id, deadline in current.items()
            if self._known.get(req_id, deadline) != deadline
        }
        self._known = current
        return moved
