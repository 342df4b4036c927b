"""Life of one block set: the table, cell by cell."""

from dataclasses import replace

import pytest

from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.life import Action, Claim, IllegalEventError, Instant, Life, Limits, Pointer, State
from tests.unit.node_agent.owned import block_set

LIMITS = Limits(claim_ttl_s=30.0, margin_s=2.0, least_left_s=6.0, resend_s=3.0)
NOW = Instant(local=100.0, earliest=1100.0, latest=1100.5)
SET = block_set()

HELD = Life(SET, State.HELD, 1500.0, Pointer.PUBLISHED)
FENCED = Life(SET, State.FENCED, 1500.0)
CLAIMED = Life(SET, State.CLAIMED, 1500.0, Pointer.REMOVING, Claim("request-1", 1130.0, 132.0))
RELEASING = Life(SET, State.RELEASING, 1500.0, Pointer.REMOVING)

TABLE: list[tuple[str, Life, lf.Event, State | None, tuple[Action, ...], str]] = [
    ("claim-held", HELD, lf.ClaimAsked("r"), State.CLAIMED, (Action.TELL_CLAIMED, Action.UNPUBLISH), ""),
    ("claim-fenced", FENCED, lf.ClaimAsked("r"), State.FENCED, (), "SET_FENCED"),
    ("claim-claimed", CLAIMED, lf.ClaimAsked("r"), State.CLAIMED, (), "SET_CLAIMED"),
    ("claim-releasing", RELEASING, lf.ClaimAsked("r"), State.RELEASING, (), "SET_UNKNOWN"),
    ("return", CLAIMED, lf.ClaimReturned(), State.HELD, (Action.TELL_RETURNED, Action.PUBLISH), ""),
    ("release-held", HELD, lf.ReleaseAsked(), State.RELEASING, (Action.UNPUBLISH,), ""),
    ("release-fenced", FENCED, lf.ReleaseAsked(), State.FENCED, (), ""),
    ("release-claimed", CLAIMED, lf.ReleaseAsked(), State.CLAIMED, (), ""),
    ("release-releasing", RELEASING, lf.ReleaseAsked(), State.RELEASING, (), ""),
    ("lift", FENCED, lf.FenceLifted(), State.HELD, (Action.PUBLISH,), ""),
    ("lift-granted", replace(FENCED, granted_before=True), lf.FenceLifted(), State.RELEASING, (Action.RELEASE,), ""),
    ("lift-unwanted", replace(FENCED, release_wanted=True), lf.FenceLifted(), State.RELEASING, (Action.RELEASE,), ""),
    ("freed-held", HELD, lf.Freed(), None, (Action.UNPUBLISH,), ""),
    ("freed-fenced", FENCED, lf.Freed(), None, (), ""),
    ("freed-claimed", CLAIMED, lf.Freed(), None, (), ""),
    ("freed-releasing", RELEASING, lf.Freed(), None, (), ""),
    ("pointer-gone-releasing", RELEASING, lf.PointerGone(), State.RELEASING, (Action.RELEASE,), ""),
    ("pointer-gone-claimed", CLAIMED, lf.PointerGone(), State.CLAIMED, (), ""),
    ("pointer-gone-held", HELD, lf.PointerGone(), State.HELD, (), ""),
    ("tick-fenced", FENCED, lf.Tick(), State.FENCED, (), ""),
    ("tick-held", HELD, lf.Tick(), State.HELD, (), ""),
    ("tick-claimed", CLAIMED, lf.Tick(), State.CLAIMED, (), ""),
    ("tick-releasing", RELEASING, lf.Tick(), State.RELEASING, (), ""),
    ("jump-held", HELD, lf.ClockJumped(), State.RELEASING, (Action.UNPUBLISH,), ""),
    ("jump-claimed", CLAIMED, lf.ClockJumped(), State.CLAIMED, (), ""),
    ("jump-fenced", FENCED, lf.ClockJumped(), State.FENCED, (), ""),
    ("seen-claimed-unnoted", CLAIMED, lf.Seen(False, 1500.0), State.CLAIMED, (Action.TELL_CLAIMED,), ""),
    ("seen-held-noted", HELD, lf.Seen(True, 1500.0), State.HELD, (Action.TELL_RETURNED,), ""),
    ("seen-as-known", HELD, lf.Seen(False, 1500.0), State.HELD, (), ""),
    ("found-held", HELD, lf.Found(False, 1500.0), State.FENCED, (Action.UNPUBLISH,), ""),
    ("found-claimed", CLAIMED, lf.Found(False, 1500.0), State.FENCED, (), ""),
    ("found-releasing", RELEASING, lf.Found(False, 1500.0), State.FENCED, (), ""),
    ("confirmed", HELD, lf.Confirmed(1600.0), State.HELD, (), ""),
]


@pytest.mark.parametrize(
    ("life", "event", "state", "actions", "refusal"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_each_event_does_what_the_table_says(
    life: Life, event: lf.Event, state: State | None, actions: tuple[Action, ...], refusal: str
) -> None:
    outcome = lf.step(life, event, NOW, LIMITS)
    assert (outcome.life and outcome.life.state, outcome.actions, outcome.refusal) == (state, actions, refusal)


@pytest.mark.parametrize(
    ("life", "event", "due"),
    [
        (FENCED, lf.Tick(), False),
        (FENCED, lf.FenceLifted(), True),
        (HELD, lf.Tick(), False),
        (replace(HELD, deadline=NOW.earliest), lf.Tick(), True),
        (CLAIMED, lf.Tick(), False),
        (replace(CLAIMED, claim=Claim("request-1", 1130.0, NOW.local)), lf.Tick(), True),
        (RELEASING, lf.Tick(), False),
        (replace(RELEASING, pointer=Pointer.ABSENT), lf.Tick(), True),
        (replace(RELEASING, pointer=Pointer.ABSENT, send_at=NOW.local + 0.1), lf.Tick(), False),
    ],
)
def test_time_that_passes_changes_only_what_is_due(life: Life, event: lf.Event, due: bool) -> None:
    assert lf.changes(life, event, NOW, LIMITS) is due


@pytest.mark.parametrize(
    ("life", "event"),
    [
        (FENCED, lf.ClaimReturned()),
        (HELD, lf.ClaimReturned()),
        (RELEASING, lf.ClaimReturned()),
        (HELD, lf.FenceLifted()),
        (CLAIMED, lf.FenceLifted()),
        (RELEASING, lf.FenceLifted()),
    ],
)
def test_an_event_that_a_state_does_not_allow_is_an_error(life: Life, event: lf.Event) -> None:
    with pytest.raises(IllegalEventError):
        lf.step(life, event, NOW, LIMITS)


def _claimed(life: Life, at: Instant = NOW) -> Claim:
    outcome = lf.step(life, lf.ClaimAsked("request-1"), at, LIMITS)
    assert outcome.life is not None
    assert outcome.life.claim is not None
    return outcome.life.claim


def test_a_grant_that_a_replay_names_behind_the_fence_is_never_given_again() -> None:
    seen = lf.step(FENCED, lf.Seen(True, 1500.0), NOW, LIMITS).life
    assert seen is not None
    lifted = lf.step(seen, lf.FenceLifted(), NOW, LIMITS)
    assert lifted.life is not None
    assert lifted.life.state is State.RELEASING


def test_a_claims_deadline_counts_from_the_earliest_that_the_engines_clock_can_show() -> None:
    assert _claimed(HELD).deadline == 1130.0


def test_a_claims_deadline_stays_a_margin_below_the_engines() -> None:
    assert _claimed(replace(HELD, deadline=1120.0)).deadline == 1118.0


@pytest.mark.parametrize(("deadline", "refusal"), [(1108.4, "SET_EXPIRING"), (1108.6, "")])
def test_a_grant_leaves_six_seconds_by_the_latest_that_the_engines_clock_can_show(
    deadline: float, refusal: str
) -> None:
    # 1108.5 - 2.0 - 1100.5 = 6.0
    outcome = lf.step(replace(HELD, deadline=deadline), lf.ClaimAsked("r"), NOW, LIMITS)
    assert outcome.refusal == refusal


def test_a_claim_lapses_a_margin_after_the_engines_clock_must_have_passed_its_deadline() -> None:
    assert _claimed(HELD).lapses_at == pytest.approx(132.03)


def test_a_lapsed_claim_leads_to_a_release_and_never_back() -> None:
    life = replace(CLAIMED, pointer=Pointer.ABSENT)
    before = lf.step(life, lf.Tick(), Instant(131.9, 1131.9, 1131.9), LIMITS)
    assert before.life == life
    after = lf.step(life, lf.Tick(), Instant(132.0, 1132.0, 1132.0), LIMITS)
    assert after.life is not None
    assert (after.life.state, after.life.claim, after.actions) == (State.RELEASING, None, (Action.RELEASE,))


def test_a_release_waits_for_the_pointers_removal() -> None:
    for _ in range(3):
        assert lf.step(RELEASING, lf.Tick(), NOW, LIMITS).actions == ()
    assert lf.step(RELEASING, lf.PointerGone(), NOW, LIMITS).actions == (Action.RELEASE,)


def test_a_release_waits_until_this_agent_is_certain_to_be_the_owner() -> None:
    life = replace(RELEASING, pointer=Pointer.ABSENT)
    assert lf.step(life, lf.Tick(), replace(NOW, owner=False), LIMITS).actions == ()
    assert lf.step(life, lf.Tick(), NOW, LIMITS).actions == (Action.RELEASE,)


def test_a_release_is_repeated_every_few_seconds_until_the_deadline() -> None:
    life: Life | None = replace(RELEASING, pointer=Pointer.ABSENT, deadline=1110.0)
    sent = []
    for second in range(20):
        assert life is not None
        outcome = lf.step(life, lf.Tick(), Instant(100.0 + second, 1100.0 + second, 1100.0 + second), LIMITS)
        life = outcome.life
        if Action.RELEASE in outcome.actions:
            sent.append(second)
    assert sent == [0, 3, 6, 9]


def test_a_set_past_its_deadline_is_taken_out_of_use_but_known_until_the_engine_frees_it() -> None:
    outcome = lf.step(replace(HELD, deadline=1100.0), lf.Tick(), NOW, LIMITS)
    assert outcome.life is not None
    assert (outcome.life.state, outcome.actions) == (State.RELEASING, (Action.UNPUBLISH,))


@pytest.mark.parametrize("life", [CLAIMED, replace(FENCED, granted_before=True)], ids=["claimed", "granted-before"])
def test_a_set_found_again_is_remembered_as_granted(life: Life) -> None:
    outcome = lf.step(life, lf.Found(False, 1500.0), NOW, LIMITS)
    assert outcome.life is not None
    assert outcome.life.granted_before


def test_a_release_asked_for_during_a_claim_follows_its_return() -> None:
    waiting = lf.step(CLAIMED, lf.ReleaseAsked(), NOW, LIMITS).life
    assert waiting is not None
    outcome = lf.step(replace(waiting, pointer=Pointer.ABSENT), lf.ClaimReturned(), NOW, LIMITS)
    assert outcome.life is not None
    assert (outcome.life.state, outcome.actions) == (State.RELEASING, (Action.TELL_RETURNED, Action.RELEASE))
