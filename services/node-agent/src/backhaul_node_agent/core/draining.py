"""When a node that is drained may leave the directory, and what is said of it until then.

It is not draining, then draining until a deadline, then it has left; there is no way back. It leaves as soon as nothing
runs on its engines and nothing is held that somebody may read or that the engines can be told to free, and at the
deadline whatever is. Whoever asks again may bring the deadline forward; nobody puts it off.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from backhaul_node_agent.core.progress import Figures

SETTLE_S = 2.0
"""How long after an operator asked the engines must be seen idle: routers chose the node for turns until they heard."""


class Phase(Enum):
    """How far a drain is."""

    SERVING = auto()
    DRAINING = auto()
    LEFT = auto()


@dataclass(frozen=True, slots=True)
class Load:
    """What the engines have to do."""

    request_count: int | None = None
    """Requests that run or wait; None when the engines do not say."""
    asked_at: float = -math.inf
    """Agent's clock: when they were asked."""
    figures: Mapping[int, Figures] = field(default_factory=dict)
    """What each of them shows, by data-parallel rank."""


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """How far a drain is, for whoever asks."""

    phase: Phase
    remaining_s: float
    """Until the node leaves in any case."""
    request_count: int
    """0 when the engines do not say."""
    set_count: int
    """Sets known, in whatever state."""


class Draining:
    """One node's drain."""

    def __init__(self) -> None:
        self.phase = Phase.SERVING
        self.retiring = False
        """Whether the engines are not to be used any more once the node has left."""
        self._deadline = math.inf
        self._settled_at = -math.inf
        """Agent's clock: engines that were seen idle before may have been given turns since."""

    def ask(self, now: float, within_s: float, *, retiring: bool) -> None:
        """Begins the drain, or brings its end forward."""
        if self.phase is Phase.LEFT:
            return
        self.phase = Phase.DRAINING
        self._deadline = min(self._deadline, now + within_s)
        if retiring and not self.retiring:
            self.retiring = True
            self._settled_at = now + SETTLE_S

    def due(self, load: Load, held_count: int, now: float) -> bool:
        """Tells whether the node is to leave now."""
        if self.phase is not Phase.DRAINING:
            return False
        idle = load.request_count == 0 and load.asked_at >= self._settled_at
        return now >= self._deadline or (idle and not held_count)

    def leave(self) -> None:
        """Notes that the node has left."""
        self.phase = Phase.LEFT

    def remaining_s(self, now: float) -> float:
        """Returns the time until the node leaves in any case; 0 when it is not draining."""
        return max(0.0, self._deadline - now) if self.phase is Phase.DRAINING else 0.0

    def reason(self, load: Load, held_count: int, now: float) -> str:
        """Says how far it is; empty when the node is not draining."""
        if self.phase is Phase.SERVING:
            return ""
        if self.phase is Phase.LEFT:
            return "drained: the node has left the directory"
        left = f"leaves in {math.ceil(self.remaining_s(now))} s"
        held = _count(held_count, "block set is held", "block sets are held")
        if load.request_count is None:
            return f"draining: the engine does not say what runs, {held}, {left}"
        return f"draining: {_count(load.request_count, 'request runs', 'requests run')}, {held}, {left} at the latest"


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
