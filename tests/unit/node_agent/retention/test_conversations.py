"""Which turn continues which, and what is learnt of the time in between."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from backhaul_node_agent.core.claim_book import SetName
from backhaul_node_agent.core.retention.conversations import MAX_PER_KEY, Conversations, covers
from backhaul_node_agent.core.retention.gaps import Crowd, Gaps, Pace
from tests.unit.node_agent.owned import anchored, block_set


@dataclass
class SeenGaps(Gaps):
    """Remembers what it is told."""

    told: list[tuple[str, Pace, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def returned(self, crowd: Crowd, gap_s: float, now: float) -> None:
        self.told.append(("returned", crowd.pace, round(gap_s, 6)))

    def silent(self, crowd: Crowd, age_s: float, now: float) -> None:
        self.told.append(("silent", crowd.pace, round(age_s, 6)))


class Talks:
    """Conversations, with a hand on the clock."""

    def __init__(self, **options: Any) -> None:
        self.gaps = SeenGaps()
        self.made = Conversations(self.gaps, **{"max_age_s": 1800.0, **options})

    def turn(
        self,
        set_id: str,
        now: float,
        *,
        keys: tuple[str, ...] = (),
        continues: tuple[str, ...] = (),
        turn_s: float = 0.0,
        just_now: bool = True,
        scope: str = "scope-1",
    ) -> list[str]:
        held = block_set(set_id, scope, keys=keys or (f"after-{set_id}",), continues=continues, turn_s=turn_s)
        near = self.made.ended(SetName("engine-1", set_id), held, now, just_now=just_now)
        return [name.set_id for name in near]

    def pace(self, set_id: str) -> Pace:
        return self.made.crowd_of(SetName("engine-1", set_id), "scope-1").pace


def test_a_turn_that_names_another_continues_it_after_the_gap_between_end_and_begin() -> None:
    talks = Talks()
    talks.turn("a", 100.0)

    assert talks.turn("b", 112.0, continues=("unknown", "after-a"), turn_s=10.0) == ["a"]

    assert talks.gaps.told == [("returned", Pace.FIRST, 2.0)]
    assert (talks.pace("a"), talks.pace("b")) == (Pace.FIRST, Pace.FAST)


def test_a_turn_of_another_scope_continues_nothing() -> None:
    talks = Talks()
    talks.turn("a", 100.0)

    assert talks.turn("b", 112.0, continues=("after-a",), scope="scope-2") == []
    assert talks.gaps.told == []


def test_each_gap_is_learnt_once_and_every_branch_has_its_own_pace() -> None:
    talks = Talks()
    talks.turn("a", 0.0)
    talks.turn("b", 3.0, continues=("after-a",))
    talks.turn("c", 60.0, continues=("after-a",))

    assert talks.gaps.told == [("returned", Pace.FIRST, 3.0)]
    assert (talks.pace("b"), talks.pace("c")) == (Pace.FAST, Pace.SLOW)


def test_a_claim_says_when_the_next_turn_began_unless_it_is_given_back() -> None:
    talks = Talks()
    talks.turn("a", 0.0)
    name = SetName("engine-1", "a")
    talks.made.claimed(name, 1.0)
    talks.made.given_back(name)
    talks.made.claim_ended(name, 2.0)
    assert talks.gaps.told == []

    talks.made.claimed(name, 40.0)
    talks.turn("b", 70.0, continues=("after-a",), turn_s=10.0)
    talks.made.claim_ended(name, 71.0)

    assert talks.gaps.told == [("returned", Pace.FIRST, 40.0)]
    assert talks.pace("b") is Pace.SLOW


def test_a_claim_that_ends_without_a_newer_turn_here_is_a_return_as_well() -> None:
    talks = Talks()
    talks.turn("a", 0.0)
    talks.made.claimed(SetName("engine-1", "a"), 7.0)
    talks.made.claim_ended(SetName("engine-1", "a"), 9.0)

    assert talks.gaps.told == [("returned", Pace.FIRST, 7.0)]


def test_a_turn_that_nobody_continues_was_silent_for_as_long_as_it_was_watched() -> None:
    talks = Talks(max_age_s=100.0)
    talks.turn("a", 0.0)
    talks.made.tick(99.0)
    assert len(talks.made) == 1

    talks.made.tick(100.0)

    assert (len(talks.made), talks.gaps.told) == (0, [("silent", Pace.FIRST, 100.0)])
    assert talks.turn("b", 101.0, continues=("after-a",)) == []


def test_no_more_turns_are_watched_than_may_be_and_the_oldest_goes() -> None:
    talks = Talks(max_turns=2)
    for number, name in enumerate("abc"):
        talks.turn(name, float(number))

    assert len(talks.made) == 2
    assert talks.gaps.told == [("silent", Pace.FIRST, 2.0)]


def test_a_turn_that_ended_before_this_agent_came_teaches_nothing_but_is_found() -> None:
    talks = Talks(max_age_s=50.0)
    talks.turn("a", 0.0, just_now=False)

    assert talks.turn("b", 5.0, continues=("after-a",)) == ["a"]
    talks.made.claimed(SetName("engine-1", "a"), 6.0)
    talks.made.claim_ended(SetName("engine-1", "a"), 7.0)
    assert talks.gaps.told == []


def test_turns_of_one_session_are_near_each_other_the_newest_of_them() -> None:
    talks = Talks()
    for number in range(MAX_PER_KEY + 4):
        talks.turn(f"set-{number}", float(number), keys=("session", f"chain-{number}"), continues=("session",))

    near = talks.turn("last", 99.0, keys=("session",))

    assert near == [f"set-{number}" for number in range(4, MAX_PER_KEY + 4)]


@pytest.mark.parametrize(
    ("older", "newer", "covered"),
    [
        pytest.param(anchored(200), anchored(300), True, id="a longer one"),
        pytest.param(anchored(200), anchored(300, edited_at=192), True, id="others behind the last common anchor"),
        pytest.param(anchored(200), anchored(300, edited_at=191), False, id="edited before the last common anchor"),
        pytest.param(anchored(200), anchored(300, edited_at=1), False, id="another prompt"),
        pytest.param(anchored(300), anchored(200), False, id="a shorter one"),
        pytest.param(anchored(200), {**anchored(300), "identity": b"o" * 16}, False, id="another identity"),
        pytest.param(anchored(63), anchored(300), False, id="too short for an anchor"),
        pytest.param(anchored(20_000), anchored(40_000), True, id="anchors further apart"),
        pytest.param(anchored(20_000), anchored(40_000, edited_at=19_000), False, id="edited, anchors further apart"),
    ],
)
def test_a_set_covers_another_if_all_common_anchors_are_equal_and_there_is_one(
    older: dict[str, Any], newer: dict[str, Any], covered: bool
) -> None:
    assert covers(block_set("new", **newer), block_set("old", **older)) is covered
