"""Which turn continues which, how long the gaps between them are, and which set a newer one makes needless.

Every turn of this node that left a set is watched, beyond the release of its set, until it is continued or too old. So
a turn that comes back for a set that was released too early is learnt from as well.
"""

from collections import OrderedDict
from dataclasses import dataclass

from backhaul_connector.anchors import DIGEST_SIZE
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.claim_book import SetName
from backhaul_node_agent.core.retention.gaps import Crowd, Gaps, Pace, pace_after

MAX_TURNS = 20_000
"""Turns that are watched at most; beyond it the oldest are given up."""
MAX_PER_KEY = 16
"""Turns that one key leads to at most, the newest: a session has one key for all its turns."""


@dataclass(slots=True)
class _Turn:
    """One that has ended."""

    names: tuple[tuple[str, str], ...]
    """Scope and key, for each of its keys."""
    crowd: Crowd
    ended_at: float | None
    """Agent's clock; None for one that ended before this agent came."""
    seen_at: float
    """Agent's clock."""
    asked_at: float | None = None
    """When a router claimed its set, unless it gave that up."""
    over: bool = False
    """Whether what there was to learn from it is learnt."""


class Conversations:
    """The turns of one node."""

    def __init__(self, gaps: Gaps, *, max_age_s: float, max_turns: int = MAX_TURNS) -> None:
        """`max_age_s` is how long a turn is waited for."""
        self._gaps = gaps
        self._max_age_s = max_age_s
        self._max_turns = max_turns
        self._turns: OrderedDict[SetName, _Turn] = OrderedDict()
        self._by_key: dict[tuple[str, str], dict[SetName, None]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def crowd_of(self, name: SetName, scope: str) -> Crowd:
        """Returns the crowd of a turn; that of a first one when it is watched no more."""
        turn = self._turns.get(name)
        return Crowd(scope, Pace.FIRST) if turn is None else turn.crowd

    def ended(self, name: SetName, block_set: BlockSet, now: float, *, just_now: bool) -> list[SetName]:
        """Takes in a turn that left a set; returns the earlier ones whose sets it may make needless, oldest first.

        A turn that ended before (not `just_now`) came at a time that nobody knows: nothing is learnt from it.
        """
        if name in self._turns:
            return []
        before = self._newest([(block_set.scope, key) for key in block_set.continues])
        gap_s = None
        if before is not None and before.ended_at is not None and just_now:
            began_at = now - block_set.turn_s if before.asked_at is None else before.asked_at
            gap_s = max(0.0, began_at - before.ended_at)
            self._came_back(before, gap_s, now)
        names = tuple((block_set.scope, key) for key in block_set.keys)
        near = dict.fromkeys(
            other
            for key in (*((block_set.scope, key) for key in block_set.continues), *names)
            for other in self._at(key)
        )
        crowd = Crowd(block_set.scope, pace_after(gap_s))
        self._watch(name, _Turn(names, crowd, now if just_now else None, now), now)
        return list(near)

    def claimed(self, name: SetName, now: float) -> None:
        """Notes that a router asks for a turn's set: its next turn has begun."""
        if (turn := self._turns.get(name)) is not None:
            turn.asked_at = now

    def given_back(self, name: SetName) -> None:
        """Notes that the claim was not for the next turn."""
        if (turn := self._turns.get(name)) is not None:
            turn.asked_at = None

    def claim_ended(self, name: SetName, now: float) -> None:
        """Notes that a claim was used, or lapsed: somebody came back either way."""
        turn = self._turns.get(name)
        if turn is not None and turn.asked_at is not None and turn.ended_at is not None:
            self._came_back(turn, turn.asked_at - turn.ended_at, now)

    def tick(self, now: float) -> None:
        """Gives up turns that are too old."""
        while self._turns and next(iter(self._turns.values())).seen_at <= now - self._max_age_s:
            self._give_up_oldest(now)

    def _newest(self, keys: list[tuple[str, str]]) -> _Turn | None:
        for key in keys:
            if (names := self._at(key)) and (turn := self._turns[next(reversed(names))]):
                return turn
        return None

    def _at(self, key: tuple[str, str]) -> dict[SetName, None]:
        return self._by_key.get(key, {})

    def _came_back(self, turn: _Turn, gap_s: float, now: float) -> None:
        if not turn.over:
            turn.over = True
            self._gaps.returned(turn.crowd, gap_s, now)

    def _watch(self, name: SetName, turn: _Turn, now: float) -> None:
        self._turns[name] = turn
        for key in turn.names:
            names = self._by_key.setdefault(key, {})
            names[name] = None
            if len(names) > MAX_PER_KEY:
                del names[next(iter(names))]
        if len(self._turns) > self._max_turns:
            self._give_up_oldest(now)

    def _give_up_oldest(self, now: float) -> None:
        name, turn = self._turns.popitem(last=False)
        for key in turn.names:
            names = self._at(key)
            names.pop(name, None)
            if not names:
                self._by_key.pop(key, None)
        if not turn.over and turn.ended_at is not None:
            self._gaps.silent(turn.crowd, now - turn.ended_at, now)


def covers(newer: BlockSet, older: BlockSet) -> bool:
    """Tells whether the anchors prove that one set holds all that another one holds.

    All that both have must be equal, up to the last one below the older set's end, and there must be one. The request
    for a title, or a history that was edited, under the same key proves nothing and costs the conversation nothing.
    """
    if newer.identity != older.identity or newer.stride != older.stride or newer.token_count < older.token_count:
        return False
    spacing = max(newer.spacing, older.spacing)
    points = range(spacing, older.token_count + 1, spacing)
    return bool(points) and all(_anchor(newer, point) == _anchor(older, point) for point in points)


def _anchor(held: BlockSet, point: int) -> bytes:
    end = point // held.spacing * DIGEST_SIZE
    return held.anchors[end - DIGEST_SIZE : end]
