"""How well two lists of times can be told apart."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

_SIGMAS = 3.3
"""Chance alone goes as far once in a thousand times."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Times for what exists beside times for what does not, both in seconds."""

    there: Sequence[float]
    nowhere: Sequence[float]

    @property
    def share(self) -> float:
        """How often a time of the first kind is the longer one of a pair (the area under the ROC curve).

        0.5: whoever guesses by the time does no better than by tossing a coin; 0 or 1: the guess is always right.
        """
        ordered = sorted(self.nowhere)
        ranks = (bisect_left(ordered, time_s) + bisect_right(ordered, time_s) for time_s in self.there)
        return sum(ranks) / (2 * len(self.there) * len(ordered))

    @property
    def noise(self) -> float:
        """How far from 0.5 the share gets by chance alone, hardly ever further (Mann and Whitney)."""
        first, second = len(self.there), len(self.nowhere)
        return _SIGMAS * sqrt((first + second + 1) / (12 * first * second))

    @property
    def tells(self) -> bool:
        """Whether the times differ by more than chance."""
        return abs(self.share - 0.5) > self.noise

    @property
    def medians_ms(self) -> tuple[float, float]:
        """Median of each, milliseconds."""
        return 1000 * median(self.there), 1000 * median(self.nowhere)
