"""What this router has running on each engine, and when what it computes there will be done.

An engine is taken for one server, first come, first served, that is never idle while it has prompts. vLLM's scheduler
is nearly that (`v1/core/sched/scheduler.py`): a step computes at most ``max_num_batched_tokens`` tokens, of prompts
that it has begun before those that wait, and a prompt that does not fit is continued in the next step. So a prompt that
queues is served from the end of the one before it on, and prompts that one step finishes are answered together: the
first of them has then taken the whole step, the others nothing. Legs that merely take a hand-off do not queue: their
blocks arrive side by side.

What other routers have there is served in between: where it is known how much that is, a leg is taken to be served for
its share of the time.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from backhaul_router.core.routing.target import Target, TargetKey

RECENT_S = 2.0
"""How long what an agent says of an engine may still speak of legs that have ended, seconds: it speaks every second."""

MAX_EXPECTED_S = 3600.0
"""No leg is expected to take longer, seconds."""


class Work:
    """One leg on a target, while it runs."""

    def __init__(self, monotonic: Callable[[], float], queue: "_Queue", expected_s: float, others: float) -> None:
        """``expected_s`` 0: it does not queue."""
        self.expected_s = expected_s
        own = len(queue.works) + 1
        self._first = own == 1
        self._share = own / (own + others)
        self._monotonic = monotonic
        self._queue = queue
        self._sent_at = monotonic()
        self._served_s: float | None = None
        if expected_s:
            queue.join(self, self._sent_at)

    def served(self) -> float:
        """Its compute is over: its first byte is there, or its reply. Returns how long it was served, seconds.

        Time in which the engine served what had been sent before it does not count. The first call counts.
        """
        if self._served_s is None:
            now = self._monotonic()
            if self.expected_s:
                self._served_s = self._share * (now - max(self._sent_at, self._queue.served_at))
            else:
                self._served_s = now - self._sent_at
            self._queue.leave(self, now, served=True)
        return self._served_s

    @property
    def share(self) -> float | None:
        """Of the time until its first byte is there: for how much of it it is served; None when others are before it.

        For legs of which somebody else tells afterwards how long they took.
        """
        if not self.expected_s:
            return 1.0
        return self._share if self._first else None

    def ended(self) -> None:
        """It is over, served or not."""
        self._queue.leave(self, self._monotonic(), served=False)


@dataclass(slots=True)
class _Queue:
    """Works that one engine has to serve, in the order they were sent."""

    works: dict[Work, None] = field(default_factory=dict)
    expected_s: float = 0.0
    """Of all of them together."""
    done_at: float = -math.inf
    """When they will all be served."""
    served_at: float = -math.inf
    """When the engine was done with the last one."""

    def join(self, work: Work, now: float) -> None:
        self.works[work] = None
        self.expected_s += work.expected_s
        self.done_at = max(self.done_at, now) + work.expected_s

    def leave(self, work: Work, now: float, *, served: bool) -> None:
        """Once the first has left, the next has all of its time before it, however the first was expected to do."""
        if work not in self.works:
            return
        first = next(iter(self.works)) is work
        del self.works[work]
        self.expected_s = self.expected_s - work.expected_s if self.works else 0.0
        self.done_at = now + self.expected_s if first else self.done_at - work.expected_s
        if first or served:
            self.served_at = now


class Load:
    """Counts legs, and keeps the time until those that queue are served."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._running: Counter[TargetKey] = Counter()
        self._queues: dict[TargetKey, _Queue] = {}
        """Of targets at which something runs."""
        self._peaks: dict[TargetKey, tuple[int, float]] = {}
        """Most legs that ran on a target, and when they last did."""

    def running(self, target: Target, *, expected_s: float = 0.0, others: float = 0.0) -> "Running":
        """Returns what counts one leg on a target while it is entered.

        ``expected_s``: how long the engine will have to compute for it, seconds; 0 for what does not queue there.
        ``others``: how many legs of other routers are before it.
        """
        return Running(self, target.key, min(expected_s, MAX_EXPECTED_S) if expected_s > 0 else 0.0, others)

    def begin(self, key: TargetKey, expected_s: float, others: float) -> Work:
        """Counts one leg in."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue()
        self._running[key] += 1
        return Work(self._monotonic, queue, expected_s, others)

    def end(self, key: TargetKey, work: Work) -> None:
        """Counts it out."""
        work.ended()
        self._note_peak(key)
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
            self._queues.pop(key, None)

    @property
    def total(self) -> int:
        """Legs running on all targets."""
        return self._running.total()

    def count(self, key: TargetKey) -> int:
        """Returns the legs running on a target."""
        return self._running.get(key, 0)

    def queued(self, key: TargetKey) -> int:
        """Returns those of them that the engine has to compute for and has not served."""
        queue = self._queues.get(key)
        return len(queue.works) if queue else 0

    def recent(self, key: TargetKey) -> int:
        """Returns the most legs that ran there at once within the last 2 s."""
        peak, at = self._peaks.get(key, (0, -math.inf))
        count = self.count(key)
        return max(peak, count) if self._monotonic() - at < RECENT_S else count

    def wait_s(self, key: TargetKey) -> float:
        """Returns how long until the target has served what this router has sent there, seconds.

        What takes longer than expected counts as about to end.
        """
        queue = self._queues.get(key)
        return max(queue.done_at - self._monotonic(), 0.0) if queue and queue.works else 0.0

    def forget(self, node_ids: Collection[str]) -> None:
        """Drops what is known of nodes other than these. What still runs there counts until it ends."""
        self._queues = {key: queue for key, queue in self._queues.items() if key[0] in node_ids}
        self._peaks = {key: peak for key, peak in self._peaks.items() if key[0] in node_ids}

    def _note_peak(self, key: TargetKey) -> None:
        if self.recent(key) == self.count(key):
            self._peaks[key] = self.count(key), self._monotonic()


class Running:
    """Counts one leg while it is entered."""

    __slots__ = ("_expected_s", "_key", "_load", "_others", "_work")

    def __init__(self, load: Load, key: TargetKey, expected_s: float, others: float) -> None:
        self._load = load
        self._key = key
        self._expected_s = expected_s
        self._others = others

    def __enter__(self) -> Work:
        self._work = self._load.begin(self._key, self._expected_s, self._others)
        return self._work

    def __exit__(self, *error: object) -> None:
        self._load.end(self._key, self._work)
