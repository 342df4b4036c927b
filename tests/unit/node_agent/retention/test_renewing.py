"""When an engine is asked to keep a set longer."""

from dataclasses import replace
from typing import Any

import pytest

from backhaul_node_agent.core.life import Instant, Life, Limits, Pointer, State
from backhaul_node_agent.core.retention.renewing import MAX_TRIES, Renewals, least_s, problem, threshold_s
from tests.unit.node_agent.owned import block_set, facts

LIMITS = Limits()
FACTS = facts()
"""A renewal keeps its sets for 120 s."""
WHOLE_S = LIMITS.claim_ttl_s + LIMITS.margin_s + 2.0


def life(**changes: Any) -> Life:
    return replace(Life(block_set(), State.HELD, 1000.0, pointer=Pointer.PUBLISHED), **changes)


def at(left_s: float, **changes: Any) -> Instant:
    """Returns the moment ``left_s`` before the deadline."""
    shown = 1000.0 - left_s
    return replace(Instant(shown - 500.0, earliest=shown, latest=shown), **changes)


def test_a_set_is_renewed_when_less_is_left_than_a_whole_claim_takes() -> None:
    assert not Renewals().due(life(), at(WHOLE_S + 0.1), FACTS, LIMITS)
    assert Renewals().due(life(), at(WHOLE_S), FACTS, LIMITS)
    assert not Renewals().due(life(), at(0.0), FACTS, LIMITS), "it may be gone"


@pytest.mark.parametrize("state", [state for state in State if state is not State.HELD])
def test_only_held_sets_are_renewed(state: State) -> None:
    assert not Renewals().due(life(state=state), at(9.0), FACTS, LIMITS)


@pytest.mark.parametrize("pointer", [Pointer.ABSENT, Pointer.REMOVING])
def test_only_published_sets_are_renewed(pointer: Pointer) -> None:
    assert not Renewals().due(life(pointer=pointer), at(9.0), FACTS, LIMITS)


def test_an_agent_that_may_not_be_the_owner_renews_nothing() -> None:
    assert not Renewals().due(life(), at(9.0, owner=False), FACTS, LIMITS)


def test_an_engine_whose_clock_is_not_known_is_asked_for_nothing() -> None:
    assert not Renewals().due(life(), Instant(0.0), FACTS, LIMITS)


def test_where_renewals_do_not_reach_far_sets_are_renewed_as_late_as_a_claim_allows() -> None:
    short = replace(FACTS, lease_s=30.0)
    assert threshold_s(short, LIMITS) == least_s(LIMITS) == 10.0
    assert threshold_s(replace(FACTS, lease_s=60.0), LIMITS) == 20.0
    assert not Renewals().due(life(), at(10.1), short, LIMITS)
    assert Renewals().due(life(), at(10.0), short, LIMITS)


def test_a_heartbeat_that_would_move_nothing_is_not_sent() -> None:
    assert not Renewals().due(life(), at(9.0), replace(FACTS, lease_s=13.0), LIMITS)


def test_a_renewal_is_sent_again_until_it_shows_and_people_are_told_once_that_it_does_not() -> None:
    renewals, told = Renewals(), []
    for left_s in (20.0, 19.0, 17.0, 16.0, 14.0, 11.0):
        if renewals.due(life(), at(left_s), FACTS, LIMITS):
            renewals.sent(life(), at(left_s))
            told.append((left_s, renewals.in_vain("set-1")))

    assert told == [(20.0, False), (17.0, False), (14.0, True), (11.0, False)]
    assert MAX_TRIES == 3


def test_a_renewal_that_shows_is_over() -> None:
    renewals = Renewals()
    renewals.sent(life(), at(20.0))
    moved = life(deadline=1100.0)

    assert not renewals.due(moved, at(19.0), FACTS, LIMITS)
    assert renewals.due(moved, at(-99.0), FACTS, LIMITS), "one second left of the new one"
    renewals.sent(moved, at(-99.0))
    assert not renewals.in_vain("set-1")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"ttl_s": 60.0, "lease_s": 30.0}, ""),
        ({"ttl_s": 10.0}, "decoder_kv_blocks_ttl"),
        ({"lease_s": 15.0}, "kv_lease_duration"),
    ],
)
def test_an_engine_whose_times_are_too_short_is_told_what_to_set(changes: dict[str, Any], told: str) -> None:
    said = problem(replace(FACTS, **changes), LIMITS)

    assert said.startswith(told)
    assert bool(said) is bool(told)
