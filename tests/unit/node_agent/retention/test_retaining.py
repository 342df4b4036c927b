"""What retention decides at the owner: only what is HELD, for a reason that can be told."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.events import Reason
from backhaul_node_agent.core.granting import Grant
from backhaul_node_agent.core.life import State
from backhaul_node_agent.core.retention.policy import Kept, Lru
from tests.unit.node_agent.owned import LIMITS, OFFSET, OwnerTable, anchored, standing

FENCE_S = LIMITS.claim_ttl_s + LIMITS.margin_s
SMALL = replace(LIMITS, retained_share=0.012)
"""Sets may pin 12 of the engine's 1,000 blocks: three of the usual ones."""


def blocks(*ids: int) -> tuple["array[int]", ...]:
    return (array("i", ids),)


def decided(effects: Sequence[ev.Effect]) -> dict[str, Reason]:
    return {effect.set_id: effect.reason for effect in effects if isinstance(effect, ev.Decided)}


def renewed(effects: Sequence[ev.Effect]) -> list[str]:
    return [set_id for effect in effects if isinstance(effect, ev.SendRenewal) for set_id in effect.set_ids]


def lru(**changes: Any) -> OwnerTable:
    """Returns an owner that keeps three sets, and has been told that engines can be told."""
    table = standing(**{"limits": SMALL, "policy": lambda _: Lru(), **changes})
    table.retention()
    return table


# --- budget


def test_over_budget_the_sets_that_are_worth_least_are_released() -> None:
    table = lru()
    for number in (3, 1, 5, 2, 4):
        table.report(f"set-{number}", age_s=60.0 - number)

    assert decided(table.retention()) == {"set-1": Reason.SURPLUS, "set-2": Reason.SURPLUS}
    assert table.held() == ["set-3", "set-5", "set-4"]


def test_a_newly_reported_set_that_ranks_last_is_released_like_any_other() -> None:
    table = lru()
    for number in range(3):
        table.report(f"set-{number}")
    table.report("old", age_s=500.0)

    assert decided(table.memory(900)) == {"old": Reason.SURPLUS}


def test_a_policy_that_cares_sees_tokens_age_crowd_and_the_blocks_that_a_release_alone_would_free() -> None:
    seen: dict[str, Kept] = {}

    class Watching(Lru):
        def worth(self, kept: Kept) -> float:
            seen[kept.set_id] = kept
            return super().worth(kept)

    table = lru(policy=lambda _: Watching(), limits=replace(LIMITS, retained_share=0.004))
    table.report("a", block_ids=blocks(1, 2, 3, 4), token_count=128, age_s=7.0)
    table.report("b", block_ids=blocks(1, 2, 3, 5), token_count=120)
    table.retention()

    assert (seen["a"].token_count, seen["a"].block_count, seen["a"].crowd.scope) == (128, 1, "scope-1")
    assert 7.0 <= seen["a"].age_s < 7.1


def test_blocks_that_sets_have_in_common_count_once() -> None:
    table = lru()
    for number in range(9):
        table.report(f"set-{number}", block_ids=blocks(1, 2, 3, 10 + number))

    assert table.retention() == []
    table.report("one-more", block_ids=blocks(1, 2, 3, 99))
    assert list(decided(table.retention()).values()) == [Reason.SURPLUS]


def test_running_and_waiting_requests_push_sets_out_at_once() -> None:
    table = lru(limits=LIMITS)
    for number in range(50):
        table.report(f"set-{number}")
    # 200 blocks are pinned, 100 are free: the others run, and with the pinned ones fill what may be filled.
    assert table.memory(100) == []

    effects = table.memory(48)

    assert set(decided(effects).values()) == {Reason.SURPLUS}
    assert len(table.held()) == 50 - 13


def test_what_waits_for_blocks_counts_like_what_runs() -> None:
    table = lru(limits=LIMITS)
    for number in range(50):
        table.report(f"set-{number}")
    assert table.memory(300) == []

    table.memory(300, waiting_count=300)

    assert len(table.held()) == 25


def test_what_was_just_freed_does_not_pass_for_what_runs() -> None:
    table = lru(limits=LIMITS)
    for number in range(50):
        table.report(f"set-{number}")
    released = decided(table.memory(60))
    assert len(released) == 10

    table.free(*released)

    assert table.retention() == []
    assert len(table.held()) == 40


def test_what_is_being_released_counts_no_more_against_those_that_stay() -> None:
    table = lru(limits=LIMITS)
    for number in range(50):
        table.report(f"set-{number}")
    table.memory(50)
    after_the_first = table.held()
    assert len(after_the_first) == 37

    assert table.memory(50) == table.retention() == []
    assert table.held() == after_the_first


def test_claimed_sets_count_and_stay() -> None:
    table = lru()
    table.report("claimed", age_s=900.0)
    table.granted("claimed")
    for number in range(3):
        table.report(f"set-{number}")

    assert decided(table.retention()) == {"set-0": Reason.SURPLUS}
    assert table.state("claimed") is State.CLAIMED
    assert table.releases("claimed") == 0


def test_fenced_sets_count_and_stay_until_the_fence_is_over() -> None:
    table = OwnerTable(limits=SMALL, policy=lambda _: Lru())
    table.join()
    table.connect(last_session="another", replay=False)
    for number in range(4):
        table.report(f"set-{number}", replayed=True, age_s=100.0 - number)
    table.replayed()
    table.publishing()

    assert table.retention() == []
    assert all(table.state(f"set-{number}") is State.FENCED for number in range(4))
    table.report("new")
    assert decided(table.retention()) == {"new": Reason.SURPLUS}

    table.passes(FENCE_S + 1.0)
    assert decided(table.retention()) == {"set-0": Reason.SURPLUS}


def test_nothing_is_released_before_engines_can_be_told() -> None:
    table = standing(limits=SMALL)
    for number in range(9):
        table.report(f"set-{number}", **anchored(100), continues=(f"key-of-set-{number - 1}",))

    assert decided(table.memory(10)) == {}
    assert len(table.held()) == 9


# --- superseded


def test_a_newer_turn_releases_the_sets_that_it_covers_pointer_first() -> None:
    table = lru(limits=LIMITS)
    table.report("older", **anchored(200))
    effects = table.report("newer", **anchored(300), continues=("key-of-older",))

    assert decided(effects) == {"older": Reason.SUPERSEDED}
    assert [one.block_set.set_id for one in effects if isinstance(one, ev.Unpublish)] == ["older"]
    assert table.releases("older") == 0
    table.hear(ev.PointersRemoved("engine-1", ["older"]))
    assert table.releases("older") == 1
    assert not [one for one in table.effects if isinstance(one, ev.LetGo)], "nobody can come back for it"


@pytest.mark.parametrize("ends", ["superseded", "by a client"])
def test_a_claim_that_lapses_leaves_no_second_chance_for_what_nobody_comes_back_for(ends: str) -> None:
    table = standing()
    table.report("older", **anchored(200))
    assert isinstance(table.claim("older"), Grant)
    if ends == "superseded":
        table.report("newer", **anchored(300), continues=("key-of-older",))
    else:
        table.owner.release(["older"], table.now)

    table.passes(LIMITS.claim_ttl_s + 2 * LIMITS.margin_s)

    assert table.state("older") is State.RELEASING
    assert not [one for one in table.effects if isinstance(one, ev.LetGo)]


@pytest.mark.parametrize(
    "newer",
    [
        pytest.param({**anchored(300, edited_at=1), "keys": ("session",)}, id="a title request of the same session"),
        pytest.param({**anchored(300, edited_at=100), "continues": ("key-of-older",)}, id="an edited history"),
        pytest.param({**anchored(300), "continues": ("key-of-another",)}, id="another conversation"),
        pytest.param({**anchored(300), "continues": ("key-of-older",), "scope": "scope-2"}, id="another scope"),
    ],
)
def test_a_turn_without_proof_costs_the_conversation_nothing(newer: dict[str, Any]) -> None:
    table = lru(limits=LIMITS)
    table.report("older", **anchored(200), keys=("key-of-older", "session"))
    table.report("newer", **newer)

    assert table.state("older") is State.HELD


def test_a_set_under_the_same_session_is_superseded_too() -> None:
    table = lru(limits=LIMITS)
    table.report("older", **anchored(200), keys=("session", "chain-1"))

    assert decided(table.report("newer", **anchored(300), keys=("session", "chain-2"))) == {"older": Reason.SUPERSEDED}


def test_a_claimed_set_is_superseded_only_when_its_claim_is_given_back() -> None:
    table = lru(limits=LIMITS)
    table.report("older", **anchored(200))
    table.granted("older")

    assert decided(table.report("newer", **anchored(300), continues=("key-of-older",))) == {}
    assert table.state("older") is State.CLAIMED
    table.give_back()
    assert decided(table.retention()) == {"older": Reason.SUPERSEDED}


def test_what_was_superseded_behind_the_fence_is_released_after_it() -> None:
    table = OwnerTable()
    table.join()
    table.connect(last_session="another", replay=False)
    table.report("older", replayed=True, **anchored(200))
    table.replayed()
    table.publishing()
    table.report("newer", **anchored(300), continues=("key-of-older",))
    table.retention()
    assert table.state("older") is State.FENCED

    table.passes(FENCE_S + 1.0)

    assert decided(table.retention()) == {"older": Reason.SUPERSEDED}


# --- time


def test_a_set_is_renewed_until_it_has_been_kept_long_enough() -> None:
    table = lru(limits=replace(LIMITS, max_retention_s=300.0))
    table.report(ttl_s=60.0)
    table.hear(ev.PointersWritten("engine-1", ["set-1"]))
    asked: list[float] = []
    begin = table.now
    while table.state() is State.HELD and table.now < begin + 600.0:
        table.passes(1.0)
        if renewed(table.retention()):
            asked.append(table.now - begin)
            table.confirm("set-1", 120.0)
    # Each time with as much left as a whole claim takes: 34 s.
    assert asked == [26.0, 112.0, 198.0, 284.0]
    assert decided(table.effects)["set-1"] is Reason.OLD
    assert 300.0 <= table.now - begin <= 301.0


def test_while_there_is_room_even_what_is_worth_nothing_is_renewed() -> None:
    class Worthless(Lru):
        def worth(self, kept: Kept) -> float:
            return 0.0

    table = lru(policy=lambda _: Worthless())
    for number in range(3):
        table.report(f"set-{number}", ttl_s=20.0)

    assert renewed(table.retention()) == ["set-0", "set-1", "set-2"]


def test_a_sent_renewal_does_not_keep_a_set_beyond_its_deadline() -> None:
    table = lru()
    table.report(ttl_s=20.0)
    assert renewed(table.retention()) == ["set-1"]
    table.passes(13.0)

    assert table.refused() == "SET_EXPIRING"


def test_renewals_without_effect_are_told_once() -> None:
    table = lru()
    table.report(ttl_s=20.0)
    for _ in range(15):
        table.passes(1.0)
        table.retention()

    reasons = [effect.reason for effect in table.effects if isinstance(effect, ev.Decided)]
    assert reasons.count(Reason.UNCONFIRMED) == 1
    assert reasons.count(Reason.RENEWED) > 1


def test_fenced_and_claimed_sets_are_not_renewed() -> None:
    table = OwnerTable()
    table.join()
    table.connect(last_session="another", replay=False)
    table.report("fenced", replayed=True, ttl_s=20.0)
    table.replayed()
    table.report("claimed", ttl_s=20.0)
    table.granted("claimed")

    assert renewed(table.retention()) == []


def test_the_age_of_a_set_outlives_the_agent_that_was_told_of_it() -> None:
    table = OwnerTable()
    table.join()
    table.connect(last_session="another", replay=False)
    table.report(replayed=True, age_s=LIMITS.max_retention_s - FENCE_S - 5.0)
    table.replayed()
    table.publishing()
    table.passes(FENCE_S + 1.0)
    assert decided(table.retention()) == {}

    table.passes(6.0)

    assert decided(table.retention()) == {"set-1": Reason.OLD}


def test_a_set_that_is_never_published_is_released() -> None:
    table = lru()
    table.report("lost")
    table.report("found")
    table.hear(ev.PointersWritten("engine-1", ["found"]))
    table.passes(LIMITS.unpublished_s - 1.0)
    assert decided(table.retention()) == {}

    table.passes(1.0)

    assert decided(table.retention()) == {"lost": Reason.UNPUBLISHED}
    assert table.held() == ["found"]


def test_ids_that_were_never_reported_are_renewed_and_released_by_nobody() -> None:
    table = lru()
    deadlines = {"foreign": table.now + OFFSET + 5.0}
    table.hear(ev.DeadlinesConfirmed(table.connection["engine-1"], "engine-1", deadlines))
    table.memory(0, waiting_count=500)
    for _ in range(8):
        table.passes(1.0)
        table.retention()

    assert not [one for one in table.effects if isinstance(one, ev.SendRelease | ev.SendRenewal | ev.Decided)]
