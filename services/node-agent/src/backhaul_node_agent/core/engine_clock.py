"""Bounds of an engine's clock, from pings: never wrong while both clocks drift by at most `DRIFT`.

A sample says that the engine's clock showed a value at some moment between the sending of a ping and the receipt of
its answer. Each sample so gives an interval for the offset between the two clocks; intervals are intersected, and widen
with time by the drift. Whoever asks gets the earliest or the latest reading that the engine can have now, and takes the
safe side. A sample that contradicts the bounds means that the engine's clock jumped: nothing known before holds now.
"""

import math
from dataclasses import dataclass

DRIFT = 500e-6
"""Most that two monotonic clocks drift apart, in seconds per second."""

SAMPLES_TO_TRUST = 3
"""Agreeing samples after a jump until the clock is trusted again."""


@dataclass(frozen=True, slots=True)
class EngineClock:
    """What is known of one engine's clock. All times in seconds."""

    lowest_offset: float = -math.inf
    """Least that the engine's clock can be ahead of ours, at `at`."""
    highest_offset: float = math.inf
    at: float = 0.0
    """Our clock when the bounds held."""
    missing_samples: int = 1
    """Samples to come until the clock is trusted."""
    jump_count: int = 0
    """How often the clock has jumped."""

    @property
    def trusted(self) -> bool:
        """Whether the bounds may be used."""
        return self.missing_samples == 0

    def observe(self, *, sent: float, engine_now: float, received: float) -> "EngineClock":
        """Returns the clock after one ping: `sent` and `received` by our clock, `engine_now` the engine's answer."""
        lowest, highest = engine_now - received, engine_now - sent
        slack = DRIFT * (received - self.at) if math.isfinite(self.lowest_offset) else 0.0
        # The sample is a moment old when it arrives.
        own = DRIFT * (received - sent)
        joint_lowest = max(self.lowest_offset - slack, lowest - own)
        joint_highest = min(self.highest_offset + slack, highest + own)
        if joint_lowest > joint_highest:
            return EngineClock(lowest - own, highest + own, received, SAMPLES_TO_TRUST - 1, self.jump_count + 1)
        missing = max(0, self.missing_samples - 1)
        return EngineClock(joint_lowest, joint_highest, received, missing, self.jump_count)

    def earliest(self, now: float) -> float:
        """Returns the least that the engine's clock can show at `now` (ours)."""
        return now + self.lowest_offset - DRIFT * max(0.0, now - self.at)

    def latest(self, now: float) -> float:
        """Returns the most that the engine's clock can show at `now` (ours)."""
        return now + self.highest_offset + DRIFT * max(0.0, now - self.at)
