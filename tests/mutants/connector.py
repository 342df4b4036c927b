"""Mutants of what the connector proves, retains and reports."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/node-agent/connector/src/backhaul_connector"
_TESTS = "tests/unit/connector"
_MODEL = ("tests/model/test_claims.py::TestClaims",)

MUTANTS = (
    Mutant(
        "skip-proof",
        f"{_SOURCE}/prefill.py",
        "verified = verified_count(anchors, prompt.tokens, prompt.extras or ())",
        "verified = anchors.token_count",
        (f"{_TESTS}/test_prefill.py::test_a_handle_for_another_continuation_is_cut_to_the_common_start", *_MODEL),
    ),
    Mutant(
        "keep-all-blocks",
        f"{_SOURCE}/prefill.py",
        "ids = [group[:blocks] for group in handle.remote_block_ids]",
        "ids = [group[:] for group in handle.remote_block_ids]",
        (f"{_TESTS}/test_prefill.py::test_what_is_kept_is_proved_and_has_exactly_the_blocks_that_it_needs", *_MODEL),
    ),
    Mutant(
        "ignore-identity",
        f"{_SOURCE}/prefill.py",
        'return "" if anchors.identity == prompt.identity else "identity"',
        'return ""',
        (f"{_TESTS}/test_prefill.py::test_nothing_is_verified_for_another_identity", *_MODEL),
    ),
    Mutant(
        "accept-late-reads",
        f"{_SOURCE}/fence.py",
        "in_time = remaining is not None and remaining > 0",
        "in_time = remaining is not None",
        (
            f"{_TESTS}/test_fence.py::test_a_read_that_does_not_certainly_complete_in_time_fails_with_its_blocks",
            *_MODEL,
        ),
    ),
    Mutant(
        "read-refused-handle",
        f"{_SOURCE}/prefill.py",
        'return {**params, "do_remote_prefill": False, "remote_block_ids": None}',
        'return {**params, "do_remote_prefill": False}',
        (f"{_TESTS}/test_prefill.py::test_a_prompt_that_cannot_be_proved_is_refused", *_MODEL),
    ),
    Mutant(
        "use-handles-twice",
        f"{_SOURCE}/handles.py",
        "        self._used[handle] = None\n",
        "        self._used[(engine_id, str(now))] = None\n",
        (f"{_TESTS}/test_handles.py::test_a_handle_is_used_once", *_MODEL),
    ),
    Mutant(
        "remember-handles-without-end",
        f"{_SOURCE}/handles.py",
        "if len(self._used) > self._max_used:",
        "if False:",
        (f"{_TESTS}/test_handles.py::test_no_more_handles_are_remembered_than_may_be",),
    ),
    Mutant(
        "use-handles-of-a-jumped-clock",
        f"{_SOURCE}/handles.py",
        "if self._clocks.jumped(engine_id):",
        "if False:",
        (f"{_TESTS}/test_handles.py::test_a_handle_of_an_engine_whose_clock_jumped_is_refused",),
    ),
    Mutant(
        "use-handles-to-the-last",
        f"{_SOURCE}/handles.py",
        "if remaining is not None and remaining <= START_MARGIN_S:",
        "if remaining is not None and remaining <= 0:",
        (f"{_TESTS}/test_handles.py::test_a_handle_whose_read_could_not_start_in_time_is_refused",),
    ),
    Mutant(
        "trust-a-jumped-clock",
        f"{_SOURCE}/clocks.py",
        "if clock is None or clock.offset is None or clock.jumped:",
        "if clock is None or clock.offset is None:",
        (f"{_TESTS}/test_clocks.py::test_a_clock_that_jumped_stays_jumped",),
    ),
    Mutant(
        "see-no-clock-jump",
        f"{_SOURCE}/clocks.py",
        "        return later.high < widened.low or later.low > widened.high\n",
        "        return False\n",
        (f"{_TESTS}/test_clocks.py::test_an_offset_excludes_what_drift_cannot_explain",),
    ),
    Mutant(
        "clocks-do-not-drift",
        f"{_SOURCE}/clocks.py",
        "slack = _SLACK_S + DRIFT * max(0.0, now - self.at)",
        "slack = _SLACK_S",
        (f"{_TESTS}/test_clocks.py::test_widened_bounds_hold_however_the_clocks_drift",),
    ),
    Mutant(
        "forget-early-heartbeats",
        f"{_SOURCE}/leases.py",
        "self._known.update((req_id, deadline + self._offset) for req_id, deadline in retained.items())",
        "pass",
        (f"{_TESTS}/test_leases.py::test_a_heartbeat_that_comes_before_the_first_look_counts", *_MODEL),
    ),
    Mutant(
        "confirm-what-one-rank-moved",
        f"{_SOURCE}/leases.py",
        "if len(self._by_rank[req_id]) >= self._rank_count)",
        "if len(self._by_rank[req_id]) >= 1)",
        (f"{_TESTS}/test_leases.py::test_a_deadline_is_confirmed_once_every_rank_has_moved_its_own",),
    ),
    Mutant(
        "confirm-the-latest-rank",
        f"{_SOURCE}/leases.py",
        "return {req_id: min(self._by_rank[req_id].values()) for req_id in complete}",
        "return {req_id: max(self._by_rank[req_id].values()) for req_id in complete}",
        (f"{_TESTS}/test_leases.py::test_no_rank_is_ever_asked_to_keep_blocks_longer_than_it_said",),
    ),
    Mutant(
        "note-no-grants",
        f"{_SOURCE}/ledger.py",
        "self._sets[set_id] = msgspec.structs.replace(known, claimed=claimed)",
        "self._sets[set_id] = known",
        (
            f"{_TESTS}/test_ledger.py::test_an_agent_that_applies_replay_and_messages_has_exactly_the_ledgers_sets",
            *_MODEL,
        ),
    ),
    Mutant(
        "leave-notes-unread",
        f"{_SOURCE}/link.py",
        "            self._sock.shutdown(socket.SHUT_RD)\n",
        "            return\n",
        (f"{_TESTS}/test_link.py::test_no_grant_is_written_that_a_session_did_not_see_before_its_end",),
    ),
    Mutant(
        "fail-on-odd-label",
        f"{_SOURCE}/decode.py",
        "    except msgspec.ValidationError:\n",
        "    except MemoryError:\n",
        (f"{_TESTS}/test_decode.py::test_a_label_that_cannot_be_read_has_no_keys",),
    ),
    Mutant(
        "retain-without-keys",
        f"{_SOURCE}/decode.py",
        "if not label.keys or identity is None or extras is None:",
        "if identity is None or extras is None:",
        (f"{_TESTS}/test_decode.py::test_a_turn_that_nothing_can_come_back_for_retains_nothing",),
    ),
    Mutant(
        "retain-what-cannot-be-published",
        f"{_SOURCE}/wire.py",
        "[A-Za-z0-9._:-]{1,128}",
        "[!-~]{1,128}",
        (f"{_TESTS}/test_decode.py::test_a_label_takes_the_names_that_the_registry_takes",),
    ),
    Mutant(
        "report-all-tokens",
        f"{_SOURCE}/decode.py",
        "            token_count=count,\n",
        "            token_count=len(tokens),\n",
        (f"{_TESTS}/test_decode.py::test_a_report_proves_all_that_is_covered",),
    ),
    Mutant(
        "report-what-was-not-computed",
        f"{_SOURCE}/decode.py",
        "if not self._digested <= count <= len(tokens):",
        "if False:",
        (
            f"{_TESTS}/test_decode.py"
            "::test_a_turn_that_covers_less_than_its_prompt_or_more_than_there_is_is_not_reported",
        ),
    ),
    Mutant(
        "queue-without-end",
        f"{_SOURCE}/ledger.py",
        "if self._connected and len(self._queue) < self._max_queued:",
        "if self._connected:",
        (f"{_TESTS}/test_ledger.py::test_the_queue_is_bounded_and_says_that_messages_were_dropped",),
    ),
    Mutant(
        "drop-silently",
        f"{_SOURCE}/ledger.py",
        "        self._overflowed = self._connected\n",
        "",
        (
            f"{_TESTS}/test_ledger.py::test_the_queue_is_bounded_and_says_that_messages_were_dropped",
            f"{_TESTS}/test_link.py::test_an_agent_that_reads_too_slowly_gets_a_new_replay_and_the_engine_never_waits",
        ),
    ),
    Mutant(
        "report-foreign-leases",
        f"{_SOURCE}/ledger.py",
        "gone = [set_id for set_id in set_ids if self._sets.pop(set_id, None) is not None]",
        "gone = [set_id for set_id in set_ids if self._sets.pop(set_id, None) or True]",
        (f"{_TESTS}/test_ledger.py::test_only_what_is_ours_and_changed_is_reported",),
    ),
    Mutant(
        "wake-under-the-lock",
        f"{_SOURCE}/ledger.py",
        "            self._put(Retained(set=report))\n        self._wake()\n",
        "            self._put(Retained(set=report))\n            self._wake()\n",
        (f"{_TESTS}/test_ledger.py::test_each_report_wakes_the_link_without_a_lock_held",),
    ),
    Mutant(
        "wake-fails-the-engine",
        f"{_SOURCE}/link.py",
        "        with contextlib.suppress(OSError):\n            self._waker.send",
        "        with contextlib.suppress(MemoryError):\n            self._waker.send",
        (f"{_TESTS}/test_link.py::test_wakes_without_end_do_not_block",),
    ),
    Mutant(
        "stay-in-an-overflowed-session",
        f"{_SOURCE}/link.py",
        "        return self._ledger.take()\n",
        "        with contextlib.suppress(BufferError):\n            return self._ledger.take()\n        return None\n",
        (f"{_TESTS}/test_link.py::test_an_agent_that_reads_too_slowly_gets_a_new_replay_and_the_engine_never_waits",),
    ),
)
