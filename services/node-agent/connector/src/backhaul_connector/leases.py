"""Deadlines of retained blocks, from the workers that hold them to the scheduler that reports them."""

from collections.abc import Iterable, Mapping

_INTERVAL_S = 0.25
LOOKS = 512
"""Leases that are looked at in one step: a tenth of a millisecond's. With more of them a look takes several steps."""
_NOISE_S = 0.1
"""A deadline that the worker brought to its own clock itself (``nixl/pull_worker.py``, ``_start_load_kv``) differs by
the moments in between; a heartbeat that moves one by less than this counts with the next."""


class ConfirmedDeadlines:
    """Puts together what the ranks of an engine say: blocks are safe until the first rank frees them.

    A deadline counts as moved once every rank has moved its own. Until then the earlier one stands.
    """

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._by_rank: dict[str, dict[int, float]] = {}

    def update(self, moved: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        """Takes deadlines by rank and request id; returns those that every rank has moved by now."""
        touched = set()
        for rank, deadlines in moved.items():
            for req_id, deadline in deadlines.items():
                self._by_rank.setdefault(req_id, {})[rank] = deadline
                touched.add(req_id)
        complete = (req_id for req_id in touched if len(self._by_rank[req_id]) >= self._rank_count)
        return {req_id: min(self._by_rank[req_id].values()) for req_id in complete}

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops requests whose blocks are free."""
        for req_id in req_ids:
            self._by_rank.pop(req_id, None)


class LeaseWatcher:
    """Watches one worker's lease map for deadlines that heartbeats moved."""

    def __init__(self) -> None:
        self._offset = float("-inf")
        self._known: dict[str, float] = {}
        self._unseen: list[object] = []
        """Request ids that the look under way has still to come to."""
        self._seen: dict[str, float] = {}
        """Those that it has come to, and what was retained meanwhile."""
        self._due = 0.0
        self._told_count = 0

    def stepped(self, scheduler_clock: float, now: float, retained: Mapping[str, float]) -> None:
        """Notes the scheduler's clock of a step that arrives ``now``, and the deadlines of what it ``retained``.

        The scheduler may run in another process, with another epoch. The difference holds the time that the step took
        to arrive, which makes deadlines early rather than late. Only the last one counts: neither one slow step nor the
        drift of the clocks adds up.
        """
        if scheduler_clock:
            self._offset = now - scheduler_clock
            # A heartbeat may move them before the next look.
            fresh = {req_id: deadline + self._offset for req_id, deadline in retained.items()}
            self._known.update(fresh)
            self._seen.update(fresh)

    def changed(self, leases: object, now: float) -> dict[str, float]:
        """Returns the deadlines that changed since the last look, in the scheduler's clock; looks four times a second.

        ``leases`` is the worker's private ``_reqs_to_send`` (``nixl/base_worker.py``: request id to deadline in the
        worker's clock). Anything but a mapping of floats gives nothing: then no renewal counts.
        """
        if not isinstance(leases, Mapping) or self._offset == float("-inf"):
            return {}
        if not self._unseen:
            if now < self._due:
                return {}
            self._due = now + _INTERVAL_S
            self._unseen, self._seen = list(leases), {}
        return self._look(leases)

    def _look(self, leases: Mapping[object, object]) -> dict[str, float]:
        moved = {}
        for req_id in self._unseen[-LOOKS:]:
            deadline = leases.get(req_id)
            if not isinstance(req_id, str) or not isinstance(deadline, float):
                continue
            self._seen[req_id] = deadline
            if abs(self._known.get(req_id, deadline) - deadline) > _NOISE_S:
                moved[req_id] = deadline - self._offset
        del self._unseen[-LOOKS:]
        if not self._unseen:
            self._known = self._seen
        return moved

    def recounted(self) -> int | None:
        """Returns how many leases there were at the last look, when that is not what it returned before."""
        count = len(self._known)
        if count == self._told_count:
            return None
        self._told_count = count
        return count
