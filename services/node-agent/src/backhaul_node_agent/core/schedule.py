"""When time can do something to the sets of one engine, so that a tick looks at what is due and at nothing else.

What it does stands in `life` and `retaining`; here is only where to look. A set that is due and whose time does nothing
all the same (another condition is missing) stays due.
"""

import math

from backhaul_node_agent.core.life import Instant, Life, Pointer, State
from backhaul_node_agent.core.ordered import Ordered


class Schedule:
    """Kept by `follow`, which must hear of every change of a life."""

    def __init__(self) -> None:
        self._deadlines = Ordered[float]()
        """HELD sets by their deadline, engine's clock."""
        self._ends = Ordered[float]()
        """HELD sets by the end of their turn, engine's clock."""
        self._alarms = Ordered[float]()
        """By the agent's clock: CLAIMED sets by their lapse, RELEASING ones by their next release."""
        self.removing: dict[str, None] = {}
        """Sets whose pointer is being removed."""

    def follow(self, set_id: str, life: Life | None) -> None:
        """Takes in a life as it is now; None: the set is gone."""
        if life is not None and life.state is State.HELD:
            self._deadlines.put(set_id, life.deadline)
            self._ends.put(set_id, life.block_set.ended_at)
        else:
            self._deadlines.drop(set_id)
            self._ends.drop(set_id)
        alarm = _alarm(life)
        if alarm is None:
            self._alarms.drop(set_id)
        else:
            self._alarms.put(set_id, alarm)
        if life is not None and life.pointer is Pointer.REMOVING:
            self.removing[set_id] = None
        else:
            self.removing.pop(set_id, None)

    def due(self, at: Instant) -> list[str]:
        """Returns the sets that a tick can do something to."""
        return [*self._deadlines.until(at.earliest), *self._alarms.until(at.local)]

    def ending(self, at: Instant, within_s: float) -> list[str]:
        """Returns the HELD sets that may have no more than a time left, those with the least first."""
        return self._deadlines.until(at.latest + within_s) if math.isfinite(at.latest) else []

    def old(self, at: Instant, age_s: float) -> list[str]:
        """Returns the HELD sets whose turn may have ended a time ago, the oldest first."""
        return self._ends.until(at.latest - age_s) if math.isfinite(at.latest) else []


def _alarm(life: Life | None) -> float | None:
    if life is None:
        return None
    if life.claim is not None:
        return life.claim.lapses_at
    return life.send_at if life.state is State.RELEASING and life.pointer is Pointer.ABSENT else None
