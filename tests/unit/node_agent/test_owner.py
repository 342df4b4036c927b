"""Rules that hold over all sets of a node."""

import pytest

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.claim_book import MAX_RETURNED, ClaimBook
from backhaul_node_agent.core.engine_clock import SAMPLES_TO_TRUST
from backhaul_node_agent.core.granting import ClaimRequest, Grant, Refusal
from backhaul_node_agent.core.life import State
from backhaul_node_agent.core.replay import AWAY_S
from tests.unit.node_agent.owned import LIMITS, OFFSET, OwnerTable, block_set, facts, standing

FENCE_S = LIMITS.claim_ttl_s + LIMITS.margin_s


# --- engines that do not come back


def test_an_engine_whose_connector_stays_away_is_forgotten() -> None:
    table = standing()
    table.disconnect()
    table.passes(AWAY_S - 1)
    assert [known.engine_id for known in table.owner.engines()] == ["engine-1"]
    table.passes(2)
    assert table.owner.engines() == []
    assert ev.ForgetEngine("engine-1") in table.effects


def test_an_engine_that_is_away_is_remembered_while_its_sets_may_be_read() -> None:
    table = standing()
    table.report(ttl_s=480)
    table.disconnect()
    table.passes(470)
    assert table.owner.set_count == 1
    table.passes(15)
    assert table.owner.engines() == []


def test_an_engine_that_is_connected_or_back_in_time_is_not_forgotten() -> None:
    table = standing()
    table.passes(2 * AWAY_S)
    table.disconnect()
    table.passes(AWAY_S - 1)
    table.connect()
    table.passes(2 * AWAY_S)
    assert [known.engine_id for known in table.owner.engines()] == ["engine-1"]


def test_an_engine_that_comes_back_after_it_was_forgotten_is_fenced() -> None:
    table = standing()
    table.report()
    table.disconnect()
    table.passes(600)
    table.connect(replay=False)
    table.report(replayed=True)
    table.replayed()
    assert table.state() is State.FENCED


def test_a_deadline_that_a_jump_made_unknown_is_shown_as_no_time_left() -> None:
    table = standing()
    table.report()
    for _ in range(SAMPLES_TO_TRUST):
        table.ping(offset=2 * OFFSET)
    assert [held.remaining_s for held in table.owner.sets(table.now)] == [0.0]


# --- one grant per set, ever


def test_a_set_is_granted_once() -> None:
    table = standing()
    table.report()
    table.granted()
    assert table.refused(request_id="request-2") == "SET_CLAIMED"


def test_a_claim_that_lapsed_is_never_granted_again_and_its_set_is_released() -> None:
    table = standing()
    table.report()
    table.granted()
    table.hear(ev.PointersRemoved("engine-1", ["set-1"]))
    table.passes(FENCE_S + 1)
    assert table.refused(request_id="request-2") == "SET_UNKNOWN"
    assert table.releases() >= 1


def test_a_lapsed_claim_cannot_be_returned() -> None:
    table = standing()
    table.report()
    table.granted()
    table.passes(FENCE_S + 1)
    table.give_back()
    assert table.state() is State.RELEASING


def test_only_a_return_makes_a_claimed_set_available_again() -> None:
    table = standing()
    table.report()
    table.granted()
    table.connect(replay=False)
    table.report(replayed=True, granted=True)
    table.replayed()
    assert table.refused(request_id="request-2") == "SET_CLAIMED"
    table.give_back()
    table.granted(request_id="request-2")


def test_a_set_reported_twice_keeps_its_claim() -> None:
    table = standing()
    table.report()
    table.granted()
    table.report()
    assert table.refused(request_id="request-2") == "SET_CLAIMED"


# --- grants need lease, connector, clock, weights, and no drain


def test_nothing_is_granted_before_the_node_joined() -> None:
    table = OwnerTable()
    table.connect()
    table.report()
    assert table.refused() == "LEASE_INVALID"


def test_nothing_is_granted_from_the_moment_the_lease_may_have_ended() -> None:
    table = standing(lasts_s=10)
    table.report()
    table.now += 9.99
    table.granted()
    table.give_back()
    table.now += 0.01
    assert table.refused(request_id="request-2") == "LEASE_INVALID"


def test_nothing_is_granted_after_the_lease_was_lost() -> None:
    table = standing()
    table.report()
    table.hear(ev.LeaseLost())
    assert table.refused() == "LEASE_INVALID"


def test_a_grant_is_not_answered_when_the_lease_ends_meanwhile() -> None:
    table = standing()
    table.report()
    request = ClaimRequest("request-1", "set-1", "engine-1", "scope-1", "weights")
    table.owner.claim(request, table.now)
    table.hear(ev.LeaseLost())
    refusal = table.owner.confirm(request, table.now)
    assert refusal is not None
    assert refusal.reason == "LEASE_INVALID"


def test_a_repeated_claim_that_fails_does_not_take_back_the_answered_one() -> None:
    table = standing()
    table.report()
    table.granted(request_id="request-1")
    repeat = ClaimRequest("request-1", "set-1", "engine-1", "scope-1", "weights")
    assert isinstance(table.owner.claim(repeat, table.now)[0], Grant)

    # The second call's caller has gone before it was answered; the first one's may be reading.
    table.effects += table.owner.abandon("request-1", table.now)

    assert table.refused(request_id="request-2") == "SET_CLAIMED"


def test_nothing_is_granted_while_the_connector_is_away() -> None:
    table = standing()
    table.report()
    table.hear(ev.ConnectorLost(table.connection["engine-1"], "engine-1"))
    assert table.refused() == "CONNECTOR_AWAY"


def test_nothing_is_granted_until_the_connector_has_replayed_all() -> None:
    table = standing()
    table.report()
    table.connect(replay=False)
    assert table.refused() == "CONNECTOR_AWAY"
    table.report(replayed=True)
    table.replayed()
    table.granted()


def test_what_an_older_connection_says_is_void() -> None:
    table = standing()
    table.report()
    older = table.connection["engine-1"]
    table.connect(replay=False)
    table.report(replayed=True)
    table.replayed()
    table.hear(ev.SetsFreed(older, "engine-1", ["set-1"]))
    table.report("set-2", connection=older)
    table.hear(ev.ConnectorLost(older, "engine-1"))
    assert table.state() is State.HELD
    assert table.state("set-2") is None
    table.granted()


def test_nothing_is_granted_before_the_engines_clock_is_known() -> None:
    table = OwnerTable()
    table.join()
    table.connection["engine-1"] = 1
    table.hear(ev.EngineConnected(1, facts(), "session-1"))
    table.replayed()
    table.report()
    assert table.refused() == "CONNECTOR_AWAY"
    table.ping()
    table.granted()


@pytest.mark.parametrize(("ours", "theirs"), [("weights", "other"), ("", ""), ("", "weights"), ("weights", "")])
def test_engines_without_equal_known_weights_never_exchange(ours: str, theirs: str) -> None:
    table = OwnerTable()
    table.join()
    table.connect(weights=ours)
    table.report()
    outcome = table.claim(weights=theirs)
    assert isinstance(outcome, Refusal)
    assert outcome.reason == "WEIGHTS_MISMATCH"


def test_weights_that_become_known_later_count() -> None:
    table = OwnerTable()
    table.join()
    table.connect(weights="")
    table.report()
    table.hear(ev.WeightsKnown(table.connection["engine-1"], "engine-1", "weights"))
    table.granted()


def test_another_scope_sees_nothing() -> None:
    table = standing()
    table.report()
    outcome = table.claim(scope="scope-2")
    assert isinstance(outcome, Refusal)
    assert outcome.reason == "SET_UNKNOWN"


def test_a_draining_node_grants_nothing_and_releases_what_is_not_claimed() -> None:
    table = standing()
    table.report("set-1")
    table.report("set-2")
    table.granted("set-2")
    table.hear(ev.DrainAsked())
    table.report("set-3")
    assert table.refused("set-1", request_id="request-2") == "DRAINING"
    states = {set_id: table.state(set_id) for set_id in ("set-1", "set-2", "set-3")}
    assert states == {"set-1": State.RELEASING, "set-2": State.CLAIMED, "set-3": State.RELEASING}
    assert table.owner.awaited_count(can_release=True) == 3


def test_a_drain_waits_for_no_set_that_nobody_reads_and_whose_engine_cannot_be_told_or_is_away() -> None:
    table = standing()
    table.report("set-1")
    table.report("set-2")
    table.granted("set-2")
    table.hear(ev.DrainAsked())
    assert table.owner.awaited_count(can_release=False) == 1
    assert table.owner.awaited_count(can_release=True) == 2
    table.disconnect()
    assert table.owner.awaited_count(can_release=True) == 0


# --- deadlines


def test_a_renewal_counts_only_once_the_engine_confirmed_it() -> None:
    table = standing()
    table.report(ttl_s=7)
    table.owner.renew(["set-1"])
    assert table.refused() == "SET_EXPIRING"
    table.confirm("set-1", 100)
    table.granted()


def test_nothing_is_granted_past_the_confirmed_deadline_less_a_margin() -> None:
    table = standing()
    table.report(ttl_s=20)
    assert table.granted().deadline == pytest.approx(table.now + OFFSET + 18)


def test_a_set_that_expired_unclaimed_is_not_granted_and_not_found() -> None:
    table = standing()
    table.report(ttl_s=10)
    effects = table.passes(11)
    assert any(isinstance(effect, ev.Unpublish) for effect in effects)
    assert table.refused() == "SET_UNKNOWN"


def test_sets_from_before_a_jump_of_the_engines_clock_are_never_granted() -> None:
    table = standing()
    table.report("old")
    table.now += 1
    table.ping(offset=OFFSET + 50)
    assert table.refused("old") == "CONNECTOR_AWAY"
    for _ in range(3):
        table.now += 1
        table.ping(offset=OFFSET + 50)
    assert table.refused("old") == "SET_UNKNOWN"
    table.report("new", ttl_s=500)
    table.granted("new")


# --- after a restart


def restarted(*, last_session: str = "session-0") -> OwnerTable:
    """Returns an owner whose engine was connected to another agent and replays two sets, one of them granted."""
    table = OwnerTable()
    table.join()
    table.connect(last_session=last_session, replay=False)
    table.report("free", replayed=True)
    table.report("granted", replayed=True, granted=True)
    table.replayed()
    table.publishing()
    return table


def test_sets_found_after_a_restart_are_neither_granted_nor_released_until_the_fence_is_over() -> None:
    table = restarted()
    table.passes(FENCE_S - 0.5)
    assert table.refused("free") == "SET_FENCED"
    assert table.refused("granted", request_id="request-2") == "SET_FENCED"
    assert table.releases("free") == table.releases("granted") == 0
    table.passes(1)
    table.granted("free")


def test_a_set_that_another_agent_granted_is_released_after_the_fence() -> None:
    table = restarted()
    table.passes(FENCE_S + 1)
    assert table.refused("granted") == "SET_UNKNOWN"
    assert table.releases("granted") == 1


def test_what_is_behind_the_fence_is_found_by_its_scope_and_keys_until_the_fence_is_over() -> None:
    table = restarted()
    assert table.owner.fenced_engines() == ["engine-1"]
    key = block_set("free").keys[0]
    assert table.owner.fenced("scope-1", ["other", key]) == ["free"]
    assert table.owner.fenced("scope-2", [key]) == table.owner.fenced("scope-1", ["other"]) == []
    table.passes(FENCE_S + 1)
    assert table.owner.fenced("scope-1", [key]) == table.owner.fenced_engines() == []


def test_what_is_freed_behind_the_fence_is_found_no_more() -> None:
    table = restarted()
    table.free("free", "granted")
    assert table.owner.fenced_engines() == []


def test_a_release_asked_for_behind_the_fence_waits_for_it() -> None:
    table = restarted()
    assert table.release("free").deferred == ["free"]
    table.passes(FENCE_S - 0.5)
    assert table.releases("free") == 0
    table.passes(1)
    assert table.releases("free") == 1


def test_the_fence_counts_from_the_later_of_join_and_connection() -> None:
    table = OwnerTable()
    table.connect(last_session="session-0", replay=False)
    table.report(replayed=True)
    table.replayed()
    table.passes(100)
    table.join()
    table.passes(FENCE_S - 0.5)
    assert table.refused() == "SET_FENCED"
    table.passes(1)
    table.granted()


def test_the_fence_stays_closed_while_the_node_has_not_joined() -> None:
    table = OwnerTable()
    table.connect(last_session="session-0", replay=False)
    table.report(replayed=True)
    table.replayed()
    table.passes(1000)
    assert table.state() is State.FENCED


def test_a_replay_that_was_cut_does_not_open_the_fence() -> None:
    table = OwnerTable()
    table.join()
    table.connect(last_session="session-0", replay=False)
    # The connector has our session from the welcome when it comes back, and only now names the set.
    table.connect(last_session="session-1", replay=False)
    table.report(replayed=True)
    table.replayed()
    assert table.refused() == "SET_FENCED"


def test_an_engine_that_went_to_another_agent_and_came_back_is_fenced() -> None:
    table = standing()
    table.report("held")
    table.report("claimed")
    table.granted("claimed")
    table.connect(last_session="session-2", replay=False)
    table.report("held", replayed=True)
    table.report("claimed", replayed=True)
    table.replayed()
    assert table.refused("held", request_id="request-2") == "SET_FENCED"
    table.passes(FENCE_S + 1)
    assert table.refused("claimed", request_id="request-3") == "SET_UNKNOWN"
    table.granted("held", request_id="request-4")


def test_sets_retained_while_the_connection_was_cut_are_held() -> None:
    table = standing()
    table.connect(replay=False)
    table.report("new", replayed=True)
    table.replayed()
    table.granted("new")


def test_a_grant_that_this_agent_forgot_lapses_before_its_set_is_released() -> None:
    table = standing()
    table.connect(replay=False)
    table.report("forgotten", replayed=True, granted=True)
    table.replayed()
    assert table.refused("forgotten") == "SET_CLAIMED"
    table.passes(FENCE_S - 0.5)
    assert table.releases("forgotten") == 0
    table.passes(1)
    assert table.state("forgotten") is State.RELEASING


def test_sets_missing_from_a_replay_are_gone() -> None:
    table = standing()
    table.report("set-1")
    table.report("set-2")
    table.granted("set-1")
    table.connect(replay=False)
    table.report("set-2", replayed=True)
    effects = table.replayed()
    assert table.state("set-1") is None
    assert table.state("set-2") is State.HELD
    assert effects == []


def test_a_cut_connections_lost_notes_are_mended_by_the_replay() -> None:
    table = standing()
    table.report("claimed")
    table.report("returned")
    table.granted("claimed")
    table.connect(replay=False)
    table.effects.clear()
    table.report("claimed", replayed=True, granted=False)
    table.report("returned", replayed=True, granted=True)
    assert table.effects == [ev.TellClaimed("engine-1", "claimed"), ev.TellReturned("engine-1", "returned")]


# --- releases


def test_a_claimed_set_is_not_released_until_its_claim_has_lapsed() -> None:
    table = standing()
    table.report()
    table.granted()
    assert table.release("set-1").deferred == ["set-1"]
    table.hear(ev.PointersRemoved("engine-1", ["set-1"]))
    table.passes(FENCE_S - 0.5)
    assert table.releases() == 0
    table.passes(1)
    assert table.releases() == 1


def test_the_pointer_is_gone_before_the_engine_is_told_to_free_a_set() -> None:
    table = standing()
    table.report()
    table.release("set-1")
    table.passes(10)
    assert table.releases() == 0
    table.hear(ev.PointersRemoved("engine-1", ["set-1"]))
    assert table.releases() == 1


def test_a_release_does_not_wait_for_a_registry_that_cannot_be_told() -> None:
    table = standing()
    table.report("set-1")
    table.report("set-2")
    table.release("set-1")
    table.hear(ev.PublisherDown("engine-1"))
    assert table.releases("set-1") == 1
    table.release("set-2")
    assert table.releases("set-2") == 1


def test_the_pointer_of_a_set_that_is_granted_while_the_registry_is_away_is_not_waited_for() -> None:
    table = standing()
    table.hear(ev.PublisherDown("engine-1"))
    table.report()
    table.granted()
    table.passes(1)
    table.publishing()
    table.passes(LIMITS.claim_ttl_s + 2 * LIMITS.margin_s)
    assert table.state() is State.RELEASING
    assert table.releases() > 0


def test_nothing_is_released_by_an_agent_that_may_not_be_the_owner_any_more() -> None:
    table = standing(lasts_s=10)
    table.report("set-1")
    table.report("set-2")
    table.hear(ev.PublisherDown("engine-1"))
    table.hear(ev.ConnectorLost(table.connection["engine-1"], "engine-1"))
    table.release("set-1")
    table.passes(5)
    assert table.releases("set-1") == 0
    table.connect(replay=False)
    table.report("set-1", replayed=True)
    table.report("set-2", replayed=True)
    table.replayed()
    table.passes(6)
    sent = table.releases("set-1")
    assert sent >= 1
    table.release("set-2")
    table.passes(10)
    assert (table.releases("set-1"), table.releases("set-2")) == (sent, 0)


def test_a_release_is_repeated_until_the_engine_confirms_it() -> None:
    table = standing()
    table.report()
    table.release("set-1")
    table.hear(ev.PointersRemoved("engine-1", ["set-1"]))
    table.passes(7)
    assert table.releases() == 3
    table.free("set-1")
    table.passes(10)
    assert table.releases() == 3


def test_ids_that_were_never_reported_are_never_touched() -> None:
    table = standing()
    table.report()
    assert table.release("foreign").unknown == ["foreign"]
    table.free("foreign")
    table.confirm("foreign", 1000)
    renewed, unknown, effects = table.owner.renew(["foreign", "set-1"])
    assert (renewed, unknown) == (["set-1"], ["foreign"])
    assert effects == [ev.SendRenewal("engine-1", ("set-1",))]
    table.passes(1000)
    named = [effect for effect in table.effects if isinstance(effect, ev.SendRelease | ev.SendRenewal)]
    assert not any("foreign" in str(effect) for effect in named)


def test_a_set_that_is_named_twice_as_freed_is_freed() -> None:
    table = standing()
    table.report()
    table.free("set-1", "set-1")
    table.free("set-1")
    assert table.state() is None


def test_a_held_set_is_not_released_by_itself() -> None:
    table = standing()
    table.report(ttl_s=480)
    table.passes(400, step_s=5)
    assert table.state() is State.HELD
    assert table.releases() == 0


def test_the_pointer_of_a_set_that_is_granted_is_removed() -> None:
    table = standing()
    table.report()
    table.granted()
    assert table.unpublished() == ["set-1"]


def test_the_pointer_of_a_set_that_is_gone_is_removed() -> None:
    table = standing()
    table.report()
    table.free("set-1")
    assert table.unpublished() == ["set-1"]


# --- engines


def test_a_new_incarnation_ends_all_sets_pointers_and_claims_of_the_one_before() -> None:
    table = standing()
    table.report()
    table.granted()
    table.connect("engine-2", last_session="")
    assert ev.ForgetEngine("engine-1") in table.effects
    assert table.state() is None
    assert table.refused() == "SET_UNKNOWN"


def test_engines_of_other_ranks_stay() -> None:
    table = standing()
    table.report("set-1")
    table.connect("engine-2", last_session="", rank=1)
    table.granted("set-1")


def test_an_engine_that_is_gone_leaves_nothing() -> None:
    table = standing()
    table.report()
    assert table.hear(ev.EngineGone("engine-1")) == [ev.ForgetEngine("engine-1")]
    assert table.refused() == "SET_UNKNOWN"
    assert table.owner.engines() == []


def test_an_engine_that_comes_back_after_it_was_thought_gone_is_fenced() -> None:
    table = standing()
    table.report()
    table.granted()
    table.hear(ev.EngineGone("engine-1"))
    table.connect(replay=False)
    table.report(replayed=True)
    table.replayed()
    assert table.refused(request_id="request-2") == "SET_FENCED"


# --- request ids


def test_a_repeated_claim_gets_the_same_grant_and_tells_the_connector_again() -> None:
    table = standing()
    table.report()
    first = table.granted()
    table.effects.clear()
    assert table.granted().deadline == first.deadline
    assert table.effects == [ev.TellClaimed("engine-1", "set-1")]


def test_a_request_id_that_claimed_another_set_is_refused() -> None:
    table = standing()
    table.report("set-1")
    table.report("set-2")
    table.granted("set-1")
    assert table.refused("set-2") == "REQUEST_ID_REUSED"


def test_a_claim_after_its_return_is_refused_for_one_claim_ttl() -> None:
    table = standing()
    table.report()
    table.give_back()
    table.passes(LIMITS.claim_ttl_s - 1)
    assert table.refused() == "CLAIM_RETURNED"
    table.passes(2)
    table.granted()


def test_returns_are_idempotent() -> None:
    table = standing()
    table.report()
    table.granted()
    table.give_back()
    table.granted(request_id="request-2")
    table.give_back("request-1")
    assert table.refused(request_id="request-3") == "SET_CLAIMED"


def test_returned_ids_are_bounded() -> None:
    book = ClaimBook(ttl_s=30.0)
    for number in range(MAX_RETURNED + 1):
        book.mark_returned(f"request-{number}", 0.0)
    assert not book.returned("request-0", 1.0)
    assert book.returned("request-1", 1.0)
    book.expire(31.0)
    assert not book.returned(f"request-{MAX_RETURNED}", 1.0)
