"""Mutants of what is retained, how long, and at whose cost."""

from tests.mutants.mutant import Mutant

_AGENT = "services/node-agent/src/backhaul_node_agent/core"
_CONNECTOR = "services/node-agent/connector/src/backhaul_connector"
_RETAINING, _HOLDINGS, _SCHEDULE = (f"{_AGENT}/{name}.py" for name in ("retaining", "holdings", "schedule"))
_BUDGET, _PINS, _CONVERSATIONS, _RENEWING = (
    f"{_AGENT}/retention/{name}.py" for name in ("budget", "pins", "conversations", "renewing")
)
_TESTS = "tests/unit/node_agent/retention"
_MODEL = ("tests/model/test_claims.py::TestClaims",)
_OWNER_TESTS = "tests/unit/node_agent/test_owner.py"
_OVERLOOKS_NOTHING = "tests/unit/node_agent/test_schedule.py::test_a_tick_does_what_one_does_that_looks_at_every_set"
_CONVERGENCE = ("tests/model/test_convergence.py::test_from_any_state_table_engine_and_index_come_to_agree",)


def _decides(*names: str) -> tuple[str, ...]:
    return tuple(f"{_TESTS}/test_retaining.py::{name}" for name in names)


MUTANTS = (
    Mutant(
        "renewals-count-when-sent",
        _RETAINING,
        "            engine.renewals.sent(life, at)\n",
        "            engine.renewals.sent(life, at)\n"
        "            moved = lf.step(life, lf.Confirmed(at.earliest + 120.0), at, limits).life\n"
        "            engine.lives[life.block_set.set_id] = moved or life\n",
        _decides("test_a_sent_renewal_does_not_keep_a_set_beyond_its_deadline"),
    ),
    Mutant(
        "renew-for-ever",
        _RETAINING,
        "in engine.schedule.old(at, most_s) if",
        "in engine.schedule.old(at, most_s * 100) if",
        (
            *_decides(
                "test_a_set_is_renewed_until_it_has_been_kept_long_enough",
                "test_the_age_of_a_set_outlives_the_agent_that_was_told_of_it",
            ),
            *_MODEL,
        ),
    ),
    Mutant(
        "renew-what-is-not-held",
        _RENEWING,
        "if life.state is not State.HELD or life.pointer",
        "if life.pointer",
        (f"{_TESTS}/test_renewing.py::test_only_held_sets_are_renewed",),
    ),
    Mutant(
        "renew-what-is-not-published",
        _RENEWING,
        "life.state is not State.HELD or life.pointer is not Pointer.PUBLISHED or",
        "life.state is not State.HELD or",
        (f"{_TESTS}/test_renewing.py::test_only_published_sets_are_renewed",),
    ),
    Mutant(
        "renew-once-only",
        _RENEWING,
        "or at.local >= asked.at + limits.resend_s",
        "or at.local >= asked.at + 1e9",
        (
            f"{_TESTS}/test_renewing.py::test_a_renewal_is_sent_again_until_it_shows_and_people_are_told_once_that_it_does_not",
        ),
    ),
    Mutant(
        "supersede-without-proof",
        _RETAINING,
        "life is not None and covers(newer, life.block_set)",
        "life is not None",
        (*_decides("test_a_turn_without_proof_costs_the_conversation_nothing"), *_MODEL),
    ),
    Mutant(
        "supersede-with-half-a-proof",
        _CONVERSATIONS,
        "points = range(spacing, older.token_count + 1, spacing)",
        "points = range(spacing, older.token_count + 1, spacing)[:1]",
        (
            f"{_TESTS}/test_conversations.py::test_a_set_covers_another_if_all_common_anchors_are_equal_and_there_is_one",
        ),
    ),
    Mutant(
        "supersede-what-is-too-short-for-a-proof",
        _CONVERSATIONS,
        "return bool(points) and all(",
        "return all(",
        (
            f"{_TESTS}/test_conversations.py"
            "::test_a_set_covers_another_if_all_common_anchors_are_equal_and_there_is_one",
        ),
    ),
    Mutant(
        "forget-what-was-superseded",
        _RETAINING,
        "            effects += self._release_where(engine, Reason.SUPERSEDED, list(engine.superseded), now)\n",
        "",
        _decides(
            "test_a_claimed_set_is_superseded_only_when_its_claim_is_given_back",
            "test_what_was_superseded_behind_the_fence_is_released_after_it",
        ),
    ),
    Mutant(
        "release-for-retention-what-is-not-held",
        _RETAINING,
        "for life in lives if life.state is State.HELD for",
        "for life in lives for",
        _decides("test_a_claimed_set_is_superseded_only_when_its_claim_is_given_back"),
    ),
    Mutant(
        "make-room-with-claimed-and-fenced-sets",
        _HOLDINGS,
        "held_before, held = (life is not None and life.state is State.HELD for",
        "held_before, held = (life is not None and life.state is not State.RELEASING for",
        _decides("test_claimed_sets_count_and_stay", "test_fenced_sets_count_and_stay_until_the_fence_is_over"),
    ),
    Mutant(
        "decide-before-engines-can-be-told",
        _RETAINING,
        "if not self._held.telling or not engine.connected",
        "if not engine.connected",
        _decides("test_nothing_is_released_before_engines_can_be_told"),
    ),
    Mutant(
        "keep-what-was-never-published",
        _RETAINING,
        "asked_by = now - self._held.limits.unpublished_s",
        "asked_by = now - 1e9",
        (*_decides("test_a_set_that_is_never_published_is_released"), *_CONVERGENCE),
    ),
    Mutant(
        "overlook-deadlines-that-moved",
        _SCHEDULE,
        "self._deadlines.put(set_id, life.deadline)",
        "self._deadlines.put(set_id, self._deadlines._keys.get(set_id, life.deadline))",
        (_OVERLOOKS_NOTHING,),
    ),
    Mutant(
        "overlook-claims-that-lapse",
        _SCHEDULE,
        "        return life.claim.lapses_at\n",
        "        return None\n",
        (
            _OVERLOOKS_NOTHING,
            f"{_OWNER_TESTS}::test_a_claim_that_lapsed_is_never_granted_again_and_its_set_is_released",
        ),
    ),
    Mutant(
        "overlook-releases-that-are-due-again",
        _SCHEDULE,
        "    return life.send_at if life.state",
        "    return None if life.state",
        (_OVERLOOKS_NOTHING,),
    ),
    Mutant(
        "overlook-removals-that-nobody-hears-of",
        _SCHEDULE,
        "            self.removing[set_id] = None\n",
        "            pass\n",
        (_OVERLOOKS_NOTHING,),
    ),
    Mutant(
        "count-blocks-twice",
        _PINS,
        "                alone[slot] += 1\n                self.block_count += 1\n            elif count == 1:",
        "                alone[slot] += 1\n            self.block_count += 1\n            if count == 1:",
        (
            f"{_TESTS}/test_pins.py::test_a_block_counts_once_however_many_sets_hold_it",
            *_decides("test_blocks_that_sets_have_in_common_count_once"),
        ),
    ),
    Mutant(
        "forget-who-holds-a-block-alone",
        _PINS,
        "                alone[holders[block]] += 1\n",
        "                pass\n",
        (f"{_TESTS}/test_pins.py::test_what_a_set_leaves_behind_is_its_last_holders_alone",),
    ),
    Mutant(
        "ignore-pressure",
        _BUDGET,
        "return max(0, min(int(memory.block_count * share), room))",
        "return int(memory.block_count * share)",
        _decides(
            "test_running_and_waiting_requests_push_sets_out_at_once",
            "test_what_waits_for_blocks_counts_like_what_runs",
        ),
    ),
    Mutant(
        "ignore-who-waits",
        _BUDGET,
        "- running - memory.waiting_count",
        "- running",
        _decides("test_what_waits_for_blocks_counts_like_what_runs"),
    ),
    Mutant(
        "take-the-freed-for-running",
        _BUDGET,
        "free = self._memory.free_count + before - self._pinned.block_count",
        "free = self._memory.free_count",
        _decides("test_what_was_just_freed_does_not_pass_for_what_runs"),
    ),
    Mutant(
        "release-again-what-is-being-released",
        _BUDGET,
        "return max(0, self._staying.block_count - self.limit)",
        "return max(0, self._pinned.block_count - self.limit)",
        _decides("test_what_is_being_released_counts_no_more_against_those_that_stay"),
    ),
    Mutant(
        "learn-a-gap-twice",
        _CONVERSATIONS,
        "        if not turn.over:\n            turn.over = True\n",
        "        if turn:\n            turn.over = True\n",
        (f"{_TESTS}/test_conversations.py::test_each_gap_is_learnt_once_and_every_branch_has_its_own_pace",),
    ),
    Mutant(
        "figures-before-what-they-follow",
        f"{_CONNECTOR}/ledger.py",
        "if self._memory_due and self._sets and self._taken_count >= self._memory_after:",
        "if self._memory_due and self._sets:",
        (
            "tests/unit/connector/test_ledger.py"
            "::test_an_agent_that_applies_replay_and_messages_has_exactly_the_ledgers_sets",
        ),
    ),
    Mutant(
        "everybody-waits-for-blocks",
        f"{_CONNECTOR}/memory.py",
        "min(self._needed, _MAX_COUNT) if self.waits else 0",
        "min(self._needed, _MAX_COUNT)",
        ("tests/unit/connector/test_memory.py::test_requests_that_wait_for_something_else_wait_for_no_blocks",),
    ),
    Mutant(
        "take-a-full-step-for-want-of-blocks",
        f"{_CONNECTOR}/memory.py",
        "self._asked is not None and planned + self._asked[1] <= self._whole_prompt_tokens",
        "self._asked is not None",
        (
            "tests/unit/connector/test_memory.py"
            "::test_a_prompt_that_does_not_fit_into_what_is_left_of_a_step_waits_for_the_next_one_and_for_no_blocks",
        ),
    ),
)
