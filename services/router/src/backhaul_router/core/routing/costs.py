"""What legs cost on each target: so much each, and so much per token, learnt from what legs took.

vLLM computes the prompts of a step together, up to ``max_num_batched_tokens`` of their tokens
(`v1/core/sched/scheduler.py`), so that the time of a step grows with its tokens whoever's they are: a leg is taken to
cost something itself, and something for each token that it computes or moves. What grows faster than with tokens
(attention over long prompts) ends up in the figures of the prompts that there are.

Times are those of `load.Work.served`. Legs that one step finished come in together, the first with the time of all the
step and the others with none: they are taken as one piece of work. A single leg that took far more or less than
expected hardly counts, for it may be an accident; with the next one like it the target has changed, and what was learnt
of it before counts little.

A target of which little is known costs what its peers do. So does one that was different for a moment only, soon after:
a slow one is given nothing, and would never show that it is well again. What was so for long is believed for long, and
the first leg that shows it still so brings it back. What nobody knows costs little: so what nobody tried is tried. A
decode engine that is given no hand-off is taken to compute like prefill engines, and to begin its answers as it does
after hand-offs, until it shows something else: of the few legs by which that would have to be learnt most are short,
and too long ones would never be tried again.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from math import isfinite, sqrt
from typing import NamedTuple

from backhaul_router.core.routing.fits import Centre, Covariance, Fit, Prior, Reading, Spread, State, Triple, dot
from backhaul_router.core.routing.target import TargetKey

PRIOR = Prior(0.02, 5e-5, 5e-6)
"""A leg, a token computed, a token read or moved: seconds. Not many engines are faster."""

MAX_TARGETS = 4096
"""Targets remembered; beyond that the one noted longest ago is forgotten, and costs what its peers do."""

MAX_TOKENS = 10_000_000
"""Of one leg."""

MIN_S, MAX_S = 1e-5, 3600.0
"""Bounds of what a leg takes."""

_TYPICAL_WEIGHT = 0.05
"""What one leg counts among all, where it is asked how long they typically are."""

_GUESS = Spread(common=2.5, own=1.0)
"""About a prior: 12 times as much is nothing strange."""

_PEERS = Spread(common=0.7, own=0.5)
"""About the figures of all targets."""

_CHANGE = Spread(common=1.5, own=0.7)
"""About the figures of a target before it changed."""

_PEERS_NOISE, _NOISE = 0.6, 0.25
"""How far legs are at least from the figures, of all targets and of their own; standard deviation of the logarithm."""

_MOST = 2.3
"""The most that one leg counts: ten times what was expected."""

_UNFIT = 2.5
"""From how many standard deviations on a leg does not fit."""

_UNFIT_COUNTS = 0.4
"""What it then counts, were it ever so far off."""

_LEAST_HALF_LIFE_S = 10.0
"""Half-life of what a target has shown for a moment only, seconds."""

_STEP_S, _TAIL = 0.01, 0.25
"""Legs of one step are noted within this time, seconds, and all but the first take less than this part of what was
expected of them."""

_LAG_S = 0.1
"""How old the parts may be that estimates are put together from, seconds: they fade within minutes."""

_ALIKE = 0.5
"""From which cosine on two legs depend on the same parts."""


class _Piece(NamedTuple):
    counts: Triple
    seconds: float


class _Noted(NamedTuple):
    """The last piece, and all that was known before it."""

    piece: _Piece
    at: float
    state: State
    suspect: "_Suspect | None"
    peers: State


class _Suspect(NamedTuple):
    """A piece that did not fit."""

    piece: _Piece
    reading: Reading


class _Figures:
    """What one kind of leg costs on one target."""

    def __init__(self, peers: Fit) -> None:
        self._fit = Fit(PRIOR, peers, _PEERS, noise=_NOISE, least_half_life_s=_LEAST_HALF_LIFE_S)
        self._peers = peers
        self._suspect: _Suspect | None = None
        self._last: _Noted | None = None
        self._parts: tuple[State, float, Triple] | None = None
        """What a leg costs by parts, when that was worked out, and from what."""

    def expected_s(self, counts: Triple, now: float) -> float:
        parts = self._parts
        if parts is None or parts[0] is not self._fit.state or now - parts[1] > _LAG_S:
            parts = self._parts = self._fit.state, now, self._fit.parts(now)
        return dot(parts[2], counts)

    def note(self, counts: Triple, seconds: float, now: float) -> None:
        piece = self._with_step(_Piece(counts, seconds), now)
        self._last = _Noted(piece, now, self._fit.state, self._suspect, self._peers.state)
        self._learn(piece, now)
        reading = self._peers.read(*piece, now)
        self._peers.learn(reading, min(max(reading.surprise, -_MOST), _MOST))

    def _with_step(self, piece: _Piece, now: float) -> _Piece:
        """Takes the piece together with those that the same step finished, as though they had not been noted."""
        last = self._last
        if last is None or now - last.at > _STEP_S or piece.seconds > _TAIL * self.expected_s(piece.counts, now):
            return piece
        self._fit.state, self._suspect, self._peers.state = last.state, last.suspect, last.peers
        (i, j, k), (x, y, z) = last.piece.counts, piece.counts
        return _Piece((i + x, j + y, k + z), last.piece.seconds + piece.seconds)

    def _learn(self, piece: _Piece, now: float) -> None:
        reading = self._fit.read(*piece, now)
        if not _fits(reading) and _fits(remembered := self._fit.remember(*piece, now)):
            reading = remembered
        if _fits(reading):
            if self._suspect is not None and _alike(reading, self._suspect.reading):
                self._suspect = None
            self._fit.learn(reading, reading.surprise)
        elif self._suspect is not None and self._suspect.reading.surprise * reading.surprise > 0:
            self._fit.loosen(_CHANGE, now)
            for one in (self._suspect.piece, piece):
                reading = self._fit.read(*one, now)
                self._fit.learn(reading, reading.surprise)
            self._suspect = None
        else:
            self._suspect = _Suspect(piece, reading)
            self._fit.learn(reading, min(max(reading.surprise, -_UNFIT_COUNTS), _UNFIT_COUNTS))


def _fits(reading: Reading) -> bool:
    return abs(reading.surprise) <= min(_UNFIT * sqrt(reading.variance + reading.state.noise), _MOST)


def _alike(one: Reading, other: Reading) -> bool:
    return dot(one.shares, other.shares) > _ALIKE * sqrt(dot(one.shares, one.shares) * dot(other.shares, other.shares))


class _Alone:
    """What a leg without a hand-off should cost: so much each as one with it, so much per token as a prefill leg."""

    def __init__(self, *, decode: Fit, prefill: Fit) -> None:
        self._decode = decode
        self._prefill = prefill

    def logs(self, now: float) -> Triple:
        """Returns the logarithms of the parts."""
        return self._decode.logs(now)[0], self._prefill.logs(now)[1], PRIOR.logs(now)[2]

    @property
    def covariance(self) -> Covariance:
        """Returns how well they are known."""
        return self._decode.covariance[0], 0.0, 0.0, self._prefill.covariance[3], 0.0, 0.0


class _Kind:
    """What one kind of leg costs, on all targets."""

    def __init__(self, monotonic: Callable[[], float], centre: Centre = PRIOR, spread: Spread = _GUESS) -> None:
        self._monotonic = monotonic
        self.peers = Fit(PRIOR, centre, spread, noise=_PEERS_NOISE)
        """What all targets show."""
        self._targets: OrderedDict[TargetKey, _Figures] = OrderedDict()
        self._typical: Triple = (1, 1000, 0)

    def expected_s(self, key: TargetKey, counts: Triple) -> float:
        figures = self._targets.get(key, self.peers)
        return min(figures.expected_s(_bounded(counts), self._monotonic()), MAX_S)

    def typical_s(self, key: TargetKey) -> float:
        return self.expected_s(key, self._typical)

    def note(self, key: TargetKey, counts: Triple, seconds: float) -> None:
        if not isfinite(seconds) or seconds < 0:
            return
        counts = _bounded(counts)
        self._figures(key).note(counts, min(max(seconds, MIN_S), MAX_S), self._monotonic())
        (_, i, j), (_, x, y) = self._typical, counts
        self._typical = 1, i + _TYPICAL_WEIGHT * (x - i), j + _TYPICAL_WEIGHT * (y - j)

    def forget(self, node_ids: Collection[str]) -> None:
        for key in [key for key in self._targets if key[0] not in node_ids]:
            del self._targets[key]

    def _figures(self, key: TargetKey) -> _Figures:
        figures = self._targets.get(key)
        if figures is None:
            figures = self._targets[key] = _Figures(self.peers)
            if len(self._targets) > MAX_TARGETS:
                self._targets.popitem(last=False)
        self._targets.move_to_end(key)
        return figures


def _bounded(counts: Triple) -> Triple:
    i, j, k = counts
    if 0 <= j <= MAX_TOKENS and 0 <= k <= MAX_TOKENS:
        return counts
    return i, min(max(j, 0), MAX_TOKENS), min(max(k, 0), MAX_TOKENS)


class Costs:
    """What legs cost on each target, in seconds that it is busy with them.

    Numbers of tokens below 0 count as 0; times that cannot be (negative, not finite) are not learnt from.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._prefill = _Kind(monotonic)
        self._decode = _Kind(monotonic)
        self._alone = _Kind(monotonic, _Alone(decode=self._decode.peers, prefill=self._prefill.peers), _PEERS)

    def prefill_s(self, key: TargetKey, *, computed: int, read: int) -> float:
        """Returns what a prefill leg costs that computes and reads so many tokens."""
        return self._prefill.expected_s(key, (1, computed, read))

    def typical_prefill_s(self, key: TargetKey) -> float:
        """Returns what a leg like those of late costs."""
        return self._prefill.typical_s(key)

    def note_prefill(self, key: TargetKey, *, computed: int, read: int, seconds: float) -> None:
        """A prefill leg has been served."""
        self._prefill.note(key, (1, computed, read), seconds)

    def decode_s(self, key: TargetKey, *, moved: int) -> float:
        """Returns how long the first piece of an answer takes with a hand-off of which so many tokens are moved."""
        return self._decode.expected_s(key, (1, 0, moved))

    def note_decode(self, key: TargetKey, *, moved: int, seconds: float) -> None:
        """The first piece of an answer is there."""
        self._decode.note(key, (1, 0, moved), seconds)

    def alone_s(self, key: TargetKey, *, computed: int) -> float:
        """Returns how long the first piece of an answer takes without a hand-off."""
        return self._alone.expected_s(key, (1, computed, 0))

    def typical_alone_s(self, key: TargetKey) -> float:
        """Returns how long it takes for a leg like those of late."""
        return self._alone.typical_s(key)

    def note_alone(self, key: TargetKey, *, computed: int, seconds: float) -> None:
        """The first piece of such an answer is there."""
        self._alone.note(key, (1, computed, 0), seconds)

    def forget(self, node_ids: Collection[str]) -> None:
        """Drops the figures of nodes other than these. Peers keep what they have shown."""
        for kind in (self._prefill, self._decode, self._alone):
            kind.forget(node_ids)
