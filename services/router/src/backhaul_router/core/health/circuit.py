"""Whether one node is well: a circuit breaker.

closed ──a failure no request can cause, faults in a row, or a share of faults beyond its peers'──► open
open ──its time is over──► half-open: one request at a time is the probe
open ──an answer, unless it is open for its share of faults──► closed: it did not fail as a whole
half-open ──answered──► starting: its share of the requests grows
half-open ──failed──► open, for twice the time
starting ──its time is over──► closed; it fails like a closed one
"""

import math
import random
from collections import deque
from dataclasses import dataclass, fields
from enum import Enum

from backhaul_router.core.engines import Failure
from backhaul_router.core.health.windows import SlidingCount
from backhaul_router.core.nodes import Node

_AT_ONCE = frozenset(
    {Failure.REFUSED, Failure.DISCONNECTED, Failure.TIMEOUT, Failure.UNAVAILABLE, Failure.GONE},
)
"""Failures that no request can bring about."""


class BreakerState(Enum):
    """How a node is used."""

    CLOSED = "closed"
    """Like any other."""
    OPEN = "open"
    """Only when there is no other."""
    HALF_OPEN = "half_open"
    """By one request at a time."""
    STARTING = "starting"
    """By a growing share of what it would get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When a node counts as failing, and for how long."""

    window_s: float = 10.0
    """How far back faults and answers count, seconds."""
    faults: int = 3
    """Faults in a row, or within the window, by which a node may count as failing. Fewer may be the requests' own."""
    share: float = 0.01
    """Share of faults among the answers since the first of them; below it a node is well enough."""
    factor: float = 3.0
    """How many times its peers' share of faults a node's must be."""
    ejection_s: float = 2.0
    """How long a failing node is used only when there is no other, seconds; doubled while it keeps failing."""
    max_ejection_s: float = 60.0
    """The longest; a node that was well for so long starts at the shortest again."""
    slow_start_s: float = 10.0
    """How long the share of a node grows that is new or well again, seconds; 0: it has all of it at once."""

    def __post_init__(self) -> None:
        """Raises ValueError, which names the setting."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name != "slow_start_s"):
                raise ValueError(f"{field.name} must be a number above 0, not {value}")
        if self.share > 1:
            raise ValueError(f"share must be at most 1, not {self.share}")
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, not {self.factor}")
        if self.max_ejection_s < self.ejection_s:
            raise ValueError(
                f"max_ejection_s must be at least ejection_s ({self.ejection_s}), not {self.max_ejection_s}"
            )


class Circuit:
    """The breaker of one node. Whoever owns it compares its faults to its peers'."""

    __slots__ = (
        "_answers", "_ejections", "_faults", "_in_a_row", "_latest", "_number", "_probing_until", "_settings",
        "_starting_until", "_until", "_well_since", "by_share", "node", "since",
    )  # fmt: skip

    def __init__(self, settings: BreakerSettings, now: float, *, starting: bool = False) -> None:
        self.node: Node | None = None
        """As last spoken of; None: not yet."""
        self.since = now
        self.by_share = False
        """Whether it is open for its share of faults, which a single answer does not refute."""
        self._settings = settings
        self._answers = SlidingCount(settings.window_s)
        self._faults = SlidingCount(settings.window_s)
        self._number = 0
        """Answers and failures so far."""
        self._latest: deque[tuple[float, int]] = deque(maxlen=settings.faults)
        """When the latest faults were, as time and as number."""
        self._in_a_row = 0
        self._until = 0.0
        """End of the ejection; 0: closed or starting."""
        self._probing_until = 0.0
        self._ejections = 0
        """How often it was ejected without having been well for long in between."""
        self._well_since = now
        self._starting_until = now + settings.slow_start_s if starting else now

    def state(self, now: float) -> BreakerState:
        """Returns how the node is used."""
        if self._until:
            return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN
        return BreakerState.STARTING if now < self._starting_until else BreakerState.CLOSED

    def ejected(self) -> bool:
        """Tells whether the node is open or half-open."""
        return self._until > 0

    def avoided(self, now: float, rng: random.Random) -> bool:
        """Tells whether another node should be preferred this time."""
        if self._until:
            return now < self._until or now < self._probing_until
        left_s = self._starting_until - now
        return left_s > 0 and rng.random() * self._settings.slow_start_s < left_s

    def counts(self, now: float) -> tuple[int, int]:
        """Returns faults and all answers within the window."""
        return self._faults.total(now), self._answers.total(now)

    def picked(self, now: float) -> None:
        """A request goes to the node. While it is half-open this is the probe, and others stay away from it."""
        if self._until and now >= self._until:
            self._probing_until = now + self._settings.ejection_s

    def answered(self, now: float) -> None:
        """A leg was answered, if only with an error that blames the client."""
        self._count(now)
        self._in_a_row = 0
        if not self._until:
            return
        if now >= self._until:
            self._heal(now)
        elif not self.by_share:
            self._until = 0.0
            self._ejections -= 1

    def failed(self, now: float) -> None:
        """A leg failed. This only counts it."""
        self._count(now)
        self._faults.add(now)
        self._latest.append((now, self._number))
        self._in_a_row += 1

    def fails_whole(self, failure: Failure) -> bool:
        """Tells whether the latest failure is enough by itself, or with those right before it."""
        return failure in _AT_ONCE or self._in_a_row >= self._settings.faults

    def fails_often(self, now: float) -> bool:
        """Tells whether the latest faults are many, whatever its peers show.

        Of a node that was ejected a moment ago one fault less is enough.
        """
        needed = max(self._settings.faults - bool(self._remembered(now)), 1)
        if len(self._latest) < needed:
            return False
        time, number = self._latest[-needed]
        answers = self._number - number + 1
        return now - time <= self._settings.window_s and needed >= self._settings.share * answers

    def eject(self, now: float, *, by_share: bool) -> None:
        """Opens it, for longer each time."""
        self._ejections = self._remembered(now)
        ejection_s = self._settings.ejection_s * 2.0 ** min(self._ejections, 30)
        self._until = now + min(ejection_s, self._settings.max_ejection_s)
        self._ejections += 1
        self.by_share = by_share

    def _remembered(self, now: float) -> int:
        """Returns the ejections that still count."""
        well = not self._until and now >= self._well_since + self._settings.max_ejection_s
        return 0 if well else self._ejections

    def _heal(self, now: float) -> None:
        """What was counted belongs to the time before."""
        self._until = 0.0
        self._well_since = now
        self._starting_until = now + self._settings.slow_start_s
        self._answers.clear()
        self._faults.clear()
        self._latest.clear()

    def _count(self, now: float) -> None:
        self._number += 1
        self._answers.add(now)
