"""What work costs as a sum of three parts, each in proportion to a count, learnt from what it took, piece by piece.

``seconds = sum(part * count)``. An extended Kalman filter follows the logarithms of the parts: so they stay positive,
and 10 ms and 10 s are followed alike, by relative error. With each piece and with time what was learnt fades towards a
centre, and the uncertainty grows back to what it was at first. So a part of which no piece tells, and a fit that nobody
feeds, end where the centre is. How far pieces are from the sum of their parts is learnt too.
"""

from dataclasses import dataclass
from math import exp, exp2, inf, log
from typing import NamedTuple, Protocol

HALF_LIFE_S = 300.0
"""The longest time without pieces after which half of the distance to the centre is left (of logarithms), seconds."""

_HALF_LIFE_PIECES = 300
"""The same in pieces, for parts of which they do not tell."""

_LEAST, _MOST = log(1 / 100), log(1e5)
"""Bounds of a part against its prior (logarithms): one that vanished could not be learnt again."""

_MOST_NOISE = 0.4
"""Bound of the noise that is learnt; variance of logarithms."""

_NOISE_WEIGHT = 0.05
"""What one piece counts for it."""

Triple = tuple[float, float, float]

Covariance = tuple[float, float, float, float, float, float]
"""Of a triple: the upper half of a symmetrical matrix, row by row."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far parts may be from a centre, as standard deviations of logarithms: 0.7 is twice as much, or half."""

    common: float
    """All of them together."""
    own: float
    """Each one, besides."""

    @property
    def covariance(self) -> Covariance:
        """Returns it as a matrix."""
        both, common = self.common**2 + self.own**2, self.common**2
        return both, common, common, both, common, both


class Centre(Protocol):
    """Towards what a fit fades."""

    def logs(self, now: float) -> Triple:
        """Returns the logarithms of the parts."""
        ...

    @property
    def covariance(self) -> Covariance:
        """Returns how well they are known."""
        ...


class Prior:
    """Parts that somebody has set down, in seconds."""

    covariance: Covariance = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def __init__(self, first: float, second: float, third: float) -> None:
        self._logs = log(first), log(second), log(third)

    def logs(self, now: float) -> Triple:
        """Returns the logarithms of the parts."""
        return self._logs

    def bounded(self, logs: Triple) -> Triple:
        """Returns the logarithms of parts that are not too far from these ones."""
        x, y, z = logs
        a, b, c = self._logs
        return (
            min(max(x, a + _LEAST), a + _MOST),
            min(max(y, b + _LEAST), b + _MOST),
            min(max(z, c + _LEAST), c + _MOST),
        )


class State(NamedTuple):
    """All that a fit has learnt. Never changed, so that it can be kept and put back."""

    logs: Triple
    covariance: Covariance
    noise: float
    """How far pieces are from the sum of their parts; variance of the logarithm."""
    at: float
    """Of the last piece."""
    since: float
    """Of the first one since the work last changed."""


class Reading(NamedTuple):
    """One piece of work against what was expected of it."""

    state: State
    """What had been learnt before, faded."""
    shares: Triple
    """Of the parts in what was expected."""
    pull: Triple
    """How much the piece tells of each part."""
    variance: float
    """Of what was expected; of its logarithm."""
    surprise: float
    """Logarithm of what it took over what was expected."""


class Fit:
    """The parts of one kind of work."""

    def __init__(
        self, prior: Prior, centre: Centre, spread: Spread, *, noise: float, least_half_life_s: float = HALF_LIFE_S
    ) -> None:
        """``spread`` is about ``centre``; ``noise`` is the least that there is, as a standard deviation.

        What has been so for a while is taken to stay so for as long: that is the half-life, within
        ``least_half_life_s`` and `HALF_LIFE_S`.
        """
        self._prior = prior
        self._centre = centre
        self._spread = spread.covariance
        self._noise = noise**2
        self._least_half_life_s = least_half_life_s
        self.state = State(centre.logs(0.0), self._spread, self._noise, at=-inf, since=inf)

    @property
    def covariance(self) -> Covariance:
        """Returns how well the parts were known at the last piece."""
        return self.state.covariance

    def logs(self, now: float) -> Triple:
        """Returns the logarithms of the parts."""
        return self._faded(self._kept(now), now)

    def expected_s(self, counts: Triple, now: float) -> float:
        """Returns what a piece of work should take, seconds."""
        return dot(self.parts(now), counts)

    def parts(self, now: float) -> Triple:
        """Returns the parts, seconds."""
        x, y, z = self.logs(now)
        return exp(x), exp(y), exp(z)

    def read(self, counts: Triple, seconds: float, now: float) -> Reading:
        """Holds a piece of work against what was expected of it. Nothing is learnt yet."""
        return self._read(counts, seconds, now, self._kept(now) * 0.5 ** (1 / _HALF_LIFE_PIECES))

    def remember(self, counts: Triple, seconds: float, now: float) -> Reading:
        """Holds it against what would be expected had nothing faded since the last piece. Nothing is learnt yet."""
        return self._read(counts, seconds, now, 1.0)

    def _read(self, counts: Triple, seconds: float, now: float, kept: float) -> Reading:
        x, y, z = logs = self._faded(kept, now)
        covariance = self._grown(kept)
        i, j, k = exp(x) * counts[0], exp(y) * counts[1], exp(z) * counts[2]
        expected = i + j + k
        shares = i / expected, j / expected, k / expected
        pull = _times(covariance, shares)
        state = State(logs, covariance, self.state.noise, now, min(self.state.since, now))
        return Reading(state, shares, pull, dot(pull, shares), log(seconds / expected))

    def learn(self, reading: Reading, surprise: float) -> None:
        """Learns from a piece, as though it had been this much of a surprise."""
        (x, y, z), covariance, noise, at, since = reading.state
        i, j, k = reading.pull
        weight = 1 / (reading.variance + noise)
        step = weight * surprise
        logs = self._prior.bounded((x + i * step, y + j * step, z + k * step))
        a, b, c, d, e, f = covariance
        i_weight, j_weight, k_weight = i * weight, j * weight, k * weight
        left = (
            a - i * i_weight,
            b - j * i_weight,
            c - k * i_weight,
            d - j * j_weight,
            e - k * j_weight,
            f - k * k_weight,
        )
        noise += _NOISE_WEIGHT * (min(reading.surprise**2, 1.0) - reading.variance - noise)
        noise = min(max(noise, self._noise), max(_MOST_NOISE, self._noise))
        self.state = State(logs, left, noise, at, since)

    def loosen(self, spread: Spread, now: float) -> None:
        """What was learnt holds less: the work has changed."""
        logs, covariance, noise, at, _ = self.state
        a, b, c, d, e, f = [value + more for value, more in zip(covariance, spread.covariance, strict=True)]
        self.state = State(logs, (a, b, c, d, e, f), noise, at, since=now)

    def _kept(self, now: float) -> float:
        """Returns the part of the distance to the centre that is left: nearly all at first, then soon hardly any."""
        half_life_s = min(max(self.state.at - self.state.since, self._least_half_life_s), HALF_LIFE_S)
        return exp2(-(((now - self.state.at) / half_life_s) ** 2))

    def _faded(self, kept: float, now: float) -> Triple:
        x, y, z = self.state.logs
        a, b, c = self._centre.logs(now)
        return a + kept * (x - a), b + kept * (y - b), c + kept * (z - c)

    def _grown(self, kept: float) -> Covariance:
        kept *= kept
        rest = 1 - kept
        a, b, c, d, e, f = self.state.covariance
        own, centre = self._spread, self._centre.covariance
        return (
            kept * a + rest * (own[0] + centre[0]),
            kept * b + rest * (own[1] + centre[1]),
            kept * c + rest * (own[2] + centre[2]),
            kept * d + rest * (own[3] + centre[3]),
            kept * e + rest * (own[4] + centre[4]),
            kept * f + rest * (own[5] + centre[5]),
        )


def dot(one: Triple, other: Triple) -> float:
    """Returns the scalar product."""
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def _times(covariance: Covariance, vector: Triple) -> Triple:
    a, b, c, d, e, f = covariance
    x, y, z = vector
    return a * x + b * y + c * z, b * x + d * y + e * z, c * x + e * y + f * z
