"""Mutants of the node agent's core."""

from tests.mutants.mutant import Mutant

_CORE = "services/node-agent/src/backhaul_node_agent/core"
_LIFE, _BOOK, _CLOCK = (f"{_CORE}/{name}.py" for name in ("life", "claim_book", "engine_clock"))
_OWNER, _GRANTING, _REPLAY, _RELEASING = (f"{_CORE}/{name}.py" for name in ("owner", "granting", "replay", "releasing"))
_TESTS = "tests/unit/node_agent"


def _owner(*names: str) -> tuple[str, ...]:
    return tuple(f"{_TESTS}/test_owner.py::{name}" for name in names)


def _life(*names: str) -> tuple[str, ...]:
    return tuple(f"{_TESTS}/test_life.py::{name}" for name in names)


_MODEL = ("tests/model/test_claims.py::TestClaims",)
_CONVERGENCE = ("tests/model/test_convergence.py::test_from_any_state_table_engine_and_index_come_to_agree",)

MUTANTS = (
    Mutant(
        "grant-claimed-again",
        _LIFE,
        'ClaimAsked: _refuse("SET_CLAIMED"),',
        "ClaimAsked: _grant,",
        (*_owner("test_a_set_is_granted_once"), *_MODEL),
    ),
    Mutant(
        "repeat-takes-back",
        _GRANTING,
        "return [] if self._held.claims.answered(request_id) else self._take_back(request_id, now)",
        "return self._take_back(request_id, now)",
        (*_owner("test_a_repeated_claim_that_fails_does_not_take_back_the_answered_one"), *_MODEL),
    ),
    Mutant(
        "lapse-to-held",
        _LIFE,
        "return _release(life, at, limits) if at.local >= life.claim.lapses_at else Step(life)",
        "return _hold(life) if at.local >= life.claim.lapses_at else Step(life)",
        (*_owner("test_a_claim_that_lapsed_is_never_granted_again_and_its_set_is_released"), *_MODEL),
    ),
    Mutant(
        "report-resets-claim",
        _REPLAY,
        "        if known is not None:\n            return self._held.step",
        "        if known is None and False:\n            return self._held.step",
        (*_owner("test_a_set_reported_twice_keeps_its_claim"), *_MODEL),
    ),
    Mutant(
        "ignore-lease",
        _GRANTING,
        "        if now >= self._held.valid_until:\n            return Refusal",
        "        if self._held.joined_at is None:\n            return Refusal",
        (
            *_owner(
                "test_nothing_is_granted_from_the_moment_the_lease_may_have_ended",
                "test_nothing_is_granted_after_the_lease_was_lost",
                "test_a_grant_is_not_answered_when_the_lease_ends_meanwhile",
            ),
            *_MODEL,
        ),
    ),
    Mutant(
        "ignore-connection",
        _GRANTING,
        "        if not engine.connected or not engine.clock.trusted:",
        "        if not engine.clock.trusted:",
        _owner(
            "test_nothing_is_granted_while_the_connector_is_away",
            "test_nothing_is_granted_until_the_connector_has_replayed_all",
        ),
    ),
    Mutant(
        "hear-older-connection",
        _OWNER,
        "if engine is None or engine.connection != event.connection:",
        "if engine is None:",
        _owner("test_what_an_older_connection_says_is_void"),
    ),
    Mutant(
        "no-fence",
        _REPLAY,
        "if event.replayed and engine.foreign:",
        "if event.replayed and False:",
        (*_owner("test_sets_found_after_a_restart_are_neither_granted_nor_released_until_the_fence_is_over"), *_MODEL),
    ),
    Mutant(
        "fence-from-connection-only",
        _REPLAY,
        "start = max(self._held.joined_at, engine.fenced_from)",
        "start = engine.fenced_from",
        _owner("test_the_fence_counts_from_the_later_of_join_and_connection"),
    ),
    Mutant(
        "fence-forgets-cut-replay",
        _REPLAY,
        "engine.foreign = engine.foreign or event.last_session != self._session",
        "engine.foreign = event.last_session != self._session",
        _owner("test_a_replay_that_was_cut_does_not_open_the_fence"),
    ),
    Mutant(
        "fence-without-claim-ttl",
        _REPLAY,
        "return now >= start + self._held.limits.claim_ttl_s + self._held.limits.margin_s",
        "return now >= start + self._held.limits.margin_s",
        (*_owner("test_sets_found_after_a_restart_are_neither_granted_nor_released_until_the_fence_is_over"), *_MODEL),
    ),
    Mutant(
        "fence-forgets-grants",
        _LIFE,
        "    if life.granted_before or life.release_wanted:\n",
        "    if life.release_wanted:\n",
        (*_owner("test_a_set_that_another_agent_granted_is_released_after_the_fence"), *_MODEL),
    ),
    Mutant(
        "found-keeps-state",
        _REPLAY,
        "        return lf.Found(event.granted, event.deadline)\n",
        "        return lf.Seen(event.granted, event.deadline)\n",
        _owner("test_an_engine_that_went_to_another_agent_and_came_back_is_fenced"),
    ),
    Mutant(
        "ignore-engine-deadline",
        _LIFE,
        "deadline = min(at.earliest + limits.claim_ttl_s, life.deadline - limits.margin_s)",
        "deadline = at.earliest + limits.claim_ttl_s",
        (*_owner("test_nothing_is_granted_past_the_confirmed_deadline_less_a_margin"), *_MODEL),
    ),
    Mutant(
        "latest-clock-for-deadline",
        _LIFE,
        "deadline = min(at.earliest + limits.claim_ttl_s,",
        "deadline = min(at.latest + limits.claim_ttl_s,",
        (*_life("test_a_claims_deadline_counts_from_the_earliest_that_the_engines_clock_can_show"), *_MODEL),
    ),
    Mutant(
        "grant-too-late",
        _LIFE,
        "if deadline - at.latest < limits.least_left_s:",
        "if deadline < at.latest:",
        (*_owner("test_a_renewal_counts_only_once_the_engine_confirmed_it"), *_MODEL),
    ),
    Mutant(
        "trust-sent-renewals",
        _RELEASING,
        "        return [set_id for ids in by_engine.values() for set_id in ids], unknown, effects",
        "        from dataclasses import replace\n"
        "        for ids in by_engine.values():\n"
        "            for set_id in ids:\n"
        "                holder = self._held.holder_of(set_id)\n"
        "                assert holder is not None\n"
        "                known = holder.lives[set_id]\n"
        "                holder.lives[set_id] = replace(known, deadline=known.deadline + holder.facts.ttl_s)\n"
        "        return [set_id for ids in by_engine.values() for set_id in ids], unknown, effects",
        (*_owner("test_a_renewal_counts_only_once_the_engine_confirmed_it"), *_MODEL),
    ),
    Mutant(
        "release-claimed",
        _LIFE,
        "        ClaimReturned: _take_back,\n        ReleaseAsked: _release_later,",
        "        ClaimReturned: _take_back,\n        ReleaseAsked: _release_now,",
        (*_owner("test_a_claimed_set_is_not_released_until_its_claim_has_lapsed"), *_MODEL),
    ),
    Mutant(
        "lapse-at-once",
        _LIFE,
        "lapses_at = at.local + (deadline - at.earliest) * (1 + 2 * DRIFT) + limits.margin_s\n    claimed",
        "lapses_at = at.local + limits.margin_s\n    claimed",
        (*_owner("test_a_claimed_set_is_not_released_until_its_claim_has_lapsed"), *_MODEL),
    ),
    Mutant(
        "release-before-pointer",
        _LIFE,
        "allowed = at.owner and life.pointer is Pointer.ABSENT and at.earliest < life.deadline",
        "allowed = at.owner and at.earliest < life.deadline",
        _owner("test_the_pointer_is_gone_before_the_engine_is_told_to_free_a_set"),
    ),
    Mutant(
        "release-without-owning",
        _LIFE,
        "allowed = at.owner and life.pointer is Pointer.ABSENT and at.earliest < life.deadline",
        "allowed = life.pointer is Pointer.ABSENT and at.earliest < life.deadline",
        _owner("test_nothing_is_released_by_an_agent_that_may_not_be_the_owner_any_more"),
    ),
    Mutant(
        "release-fenced",
        _LIFE,
        '        ClaimAsked: _refuse("SET_FENCED"),\n        ReleaseAsked: _release_later,',
        '        ClaimAsked: _refuse("SET_FENCED"),\n        ReleaseAsked: _release_now,',
        (*_owner("test_a_release_asked_for_behind_the_fence_waits_for_it"), *_MODEL),
    ),
    Mutant(
        "leave-what-ended-behind-the-fence",
        _RELEASING,
        "        return [one.set_id for one in found if not set(keys).isdisjoint(one.keys)]",
        "        return []",
        (
            *_owner("test_what_is_behind_the_fence_is_found_by_its_scope_and_keys_until_the_fence_is_over"),
            f"{_TESTS}/test_agent.py::test_a_conversation_that_ends_behind_the_fence_has_its_sets_released_after_it",
        ),
    ),
    Mutant(
        "forget-a-grant-that-a-replay-names",
        _LIFE,
        "    granted_before = life.granted_before or (life.state is State.FENCED and event.granted)",
        "    granted_before = life.granted_before",
        _life("test_a_grant_that_a_replay_names_behind_the_fence_is_never_given_again"),
    ),
    Mutant(
        "keep-old-incarnation",
        _REPLAY,
        "                effects += self._held.forget(other.facts.engine_id)\n",
        "                pass\n",
        (*_owner("test_a_new_incarnation_ends_all_sets_pointers_and_claims_of_the_one_before"), *_MODEL),
    ),
    Mutant(
        "ignore-weights",
        _GRANTING,
        "if not request.weights_digest or request.weights_digest != engine.facts.weights_digest:",
        "if request.weights_digest != engine.facts.weights_digest:",
        _owner("test_engines_without_equal_known_weights_never_exchange"),
    ),
    Mutant(
        "ignore-scope",
        _GRANTING,
        "if life is None or life.block_set.scope != request.scope:",
        "if life is None:",
        (*_owner("test_another_scope_sees_nothing"), *_MODEL),
    ),
    Mutant(
        "ignore-clock-jump",
        _CLOCK,
        "if joint_lowest > joint_highest:",
        "if False:",
        (*_owner("test_sets_from_before_a_jump_of_the_engines_clock_are_never_granted"), *_MODEL),
    ),
    Mutant(
        "touch-foreign",
        _RELEASING,
        "                unknown.append(set_id)\n            else:\n                by_engine",
        "                unknown.append(set_id)\n"
        "            if engine is None and self._held.engines:\n"
        "                by_engine.setdefault(next(iter(self._held.engines)), []).append(set_id)\n"
        "            elif engine is not None:\n"
        "                by_engine",
        (*_owner("test_ids_that_were_never_reported_are_never_touched"), *_MODEL),
    ),
    Mutant(
        "release-foreign",
        _RELEASING,
        "                outcome.unknown.append(set_id)\n                continue",
        "                outcome.unknown.append(set_id)\n"
        "                effects += [ev.SendRelease(engine_id, set_id) for engine_id in self._held.engines]\n"
        "                continue",
        (*_owner("test_ids_that_were_never_reported_are_never_touched"), *_MODEL, *_CONVERGENCE),
    ),
    Mutant(
        "keep-what-a-replay-did-not-name",
        _REPLAY,
        "list(missing or ()), lf.Freed()",
        "[], lf.Freed()",
        (*_owner("test_sets_missing_from_a_replay_are_gone"), *_CONVERGENCE),
    ),
    Mutant(
        "believe-the-deadline-of-before",
        _LIFE,
        "    seen = replace(life, deadline=event.deadline, granted_before=granted_before)",
        "    seen = replace(life, granted_before=granted_before)",
        _CONVERGENCE,
    ),
    Mutant(
        "leave-pointers-to-the-freed",
        _LIFE,
        "    _, removal = _unpublished(life)\n    return Step(None, removal)",
        "    return Step(None)",
        _CONVERGENCE,
    ),
    Mutant(
        "forget-returns",
        _BOOK,
        "return self._returned.get(request_id, now) > now",
        "return False",
        (*_owner("test_a_claim_after_its_return_is_refused_for_one_claim_ttl"), *_MODEL),
    ),
    Mutant(
        "grant-while-draining",
        _GRANTING,
        "        if self._held.draining:\n            return Refusal",
        "        if False:\n            return Refusal",
        _owner("test_a_draining_node_grants_nothing_and_releases_what_is_not_claimed"),
    ),
    Mutant(
        "keep-lapsed-for-ever",
        _LIFE,
        "return _release(life, at, limits) if at.local >= life.claim.lapses_at else Step(life)",
        "return Step(life)",
        (*_owner("test_a_claimed_set_is_not_released_until_its_claim_has_lapsed"), *_MODEL),
    ),
    Mutant(
        "release-once",
        _LIFE,
        "    return _send_release(life, at, limits)\n\n\ndef _keep",
        "    return Step(life)\n\n\ndef _keep",
        (*_owner("test_a_release_is_repeated_until_the_engine_confirms_it"), *_MODEL),
    ),
    Mutant(
        "release-held",
        _LIFE,
        "return _release(life, at, limits) if at.earliest >= life.deadline else Step(life)",
        "return _release(life, at, limits)",
        _life("test_each_event_does_what_the_table_says"),
    ),
    Mutant(
        "hold-expired",
        _LIFE,
        "return _release(life, at, limits) if at.earliest >= life.deadline else Step(life)",
        "return Step(life)",
        _owner("test_a_set_that_expired_unclaimed_is_not_granted_and_not_found"),
    ),
    Mutant(
        "keep-pointer-of-claimed",
        _LIFE,
        "return Step(claimed, (Action.TELL_CLAIMED, *removal))",
        "return Step(claimed, (Action.TELL_CLAIMED,))",
        (*_owner("test_the_pointer_of_a_set_that_is_granted_is_removed"), *_MODEL),
    ),
    Mutant(
        "keep-pointer-of-freed",
        _LIFE,
        "    return Step(None, removal)\n",
        "    return Step(None)\n",
        (*_owner("test_the_pointer_of_a_set_that_is_gone_is_removed"), *_MODEL),
    ),
)
