"""Mutants of what a turn does when something fails."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/router/src/backhaul_router"
_LOOKUPS, _ATTEMPTS, _LEGS = f"{_SOURCE}/lookups.py", f"{_SOURCE}/attempts.py", f"{_SOURCE}/legs.py"
_CHANCES, _PLANNER = f"{_SOURCE}/second_chances.py", f"{_SOURCE}/core/routing/planner.py"
_SHAPES = f"{_SOURCE}/core/legs.py"
_REGISTRY, _OWNER = f"{_SOURCE}/registry_client.py", f"{_SOURCE}/owner_client.py"


def _lookups(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/router/test_lookups.py::{name}" for name in names)


def _turns(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/router/test_turns.py::{name}" for name in names)


def _chances(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/router/test_second_chances.py::{name}" for name in names)


def _stack(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_router_turns.py::{name}" for name in names)


MUTANTS = (
    Mutant(
        "fail-with-the-registry",
        _LOOKUPS,
        "        except BackhaulError as error:\n            with trace.current()",
        "        except NotFoundError as error:\n            with trace.current()",
        _lookups("test_a_registry_that_fails_is_a_miss"),
    ),
    Mutant(
        "fail-with-the-owner",
        _LOOKUPS,
        "        except BackhaulError:\n            return misses.OWNER_UNAVAILABLE",
        "        except NotFoundError:\n            return misses.OWNER_UNAVAILABLE",
        _lookups("test_an_owner_that_does_not_grant_is_a_miss"),
    ),
    Mutant(
        "fail-on-refusal",
        _LOOKUPS,
        "        except _REFUSALS as error:\n            return misses.claim_refused(error.reason)",
        "        except _REFUSALS:\n            raise",
        _lookups("test_an_owner_that_does_not_grant_is_a_miss"),
    ),
    Mutant(
        "wait-for-the-registry",
        _LOOKUPS,
        "timeout_s=max(left, 0.0))",
        "timeout_s=3600.0)",
        _lookups("test_whoever_hangs_costs_no_more_than_the_budget"),
    ),
    Mutant(
        "wait-for-the-owner",
        _LOOKUPS,
        "grant = await self._owner.claim(claim, timeout_s=left)",
        "grant = await self._owner.claim(claim, timeout_s=self._budget_s)",
        _lookups("test_whoever_hangs_costs_no_more_than_the_budget"),
    ),
    Mutant(
        "wait-for-the-publish",
        _LOOKUPS,
        "if deadline - self._clock.monotonic() < pause + _CLAIM_RESERVE_S:",
        "if deadline - self._clock.monotonic() < -1.0:",
        _lookups("test_the_wait_for_a_publish_ends_within_the_budget_and_happens_once"),
    ),
    Mutant(
        "ask-the-registry-without-limit",
        _REGISTRY,
        "response = await stub.FindBlockSets(request, timeout=left)",
        "response = await stub.FindBlockSets(request, timeout=3.0)",
        _stack("test_a_registry_that_is_silent_or_fails_is_a_miss"),
    ),
    Mutant(
        "ask-the-owner-without-limit",
        _OWNER,
        "ClaimBlockSet(request, timeout=timeout_s)",
        "ClaimBlockSet(request, timeout=3.0)",
        _stack("test_an_owner_that_is_silent_costs_the_budget_and_its_claim_is_returned"),
    ),
    Mutant(
        "keep-claim-of-unknown-outcome",
        _OWNER,
        "            if not isinstance(error, _CERTAIN):\n                self.give_back(claim)",
        "            if False:\n                self.give_back(claim)",
        _stack("test_an_owner_that_is_silent_costs_the_budget_and_its_claim_is_returned"),
    ),
    Mutant(
        "claim-under-the-sets-name",
        _LOOKUPS,
        "request_id=str(uuid.uuid4()),",
        "request_id=found.pointer.set_id,",
        _lookups("test_every_claim_has_an_id_of_its_own"),
    ),
    Mutant(
        "keep-claim-of-bad-handle",
        _LOOKUPS,
        "            self._owner.give_back(grant.source)\n",
        "",
        _lookups("test_a_handle_that_is_no_object_is_given_back"),
    ),
    Mutant(
        "keep-unspent-claim",
        _ATTEMPTS,
        "            if not verdict.spent:\n",
        "            if False:\n",
        _turns("test_a_claim_that_was_not_spent_is_returned"),
    ),
    Mutant(
        "return-spent-claim",
        _ATTEMPTS,
        "            if not verdict.spent:\n",
        "            if True:\n",
        _turns("test_a_refused_handle_that_was_spent_is_not_returned", "test_a_warm_turn_reports_what_was_read"),
    ),
    Mutant(
        "free-what-decode-reads",
        _LEGS,
        "            turn.untold = None\n            self._observer",
        "            self._observer",
        _turns("test_a_hand_off_that_decode_reads_is_not_freed"),
    ),
    Mutant(
        "keep-untold-hand-off",
        _LEGS,
        "            self._owner.release(KeptBlocks(node.agent_address, *hand.name))",
        "            pass",
        _turns("test_a_hand_off_that_must_not_be_used_is_freed"),
    ),
    Mutant(
        "keep-unsent-claim",
        _LEGS,
        "node, grant = target.node, turn.unused\n",
        "node, grant = target.node, turn.unused\n        turn.unused = None\n",
        _turns("test_a_claim_is_returned_only_when_its_handle_cannot_have_been_sent"),
    ),
    Mutant(
        "return-sent-claim",
        _LEGS,
        "                turn.unused = None\n\n            async with",
        "                pass\n\n            async with",
        _turns("test_a_claim_is_returned_only_when_its_handle_cannot_have_been_sent"),
    ),
    Mutant(
        "fail-with-warm-prefill",
        _ATTEMPTS,
        "                turn.unread.append((node, turn.warm.holder.node))\n            return True\n",
        "                turn.unread.append((node, turn.warm.holder.node))\n",
        _turns("test_a_warm_leg_that_fails_is_repeated_cold_once_elsewhere"),
    ),
    Mutant(
        "repeat-warm",
        _ATTEMPTS,
        "        turn.warm = turn.plan = None\n",
        "        turn.plan = None\n",
        _turns(
            "test_a_warm_leg_that_fails_is_repeated_cold_once_elsewhere",
            "test_decode_that_fails_before_its_first_byte_costs_both_legs_again_elsewhere_cold",
        ),
    ),
    Mutant(
        "pass-unverified-on",
        _ATTEMPTS,
        "            params = None\n",
        "",
        _turns("test_blocks_that_nobody_verified_go_no_further"),
    ),
    Mutant(
        "hand-over-a-failed-leg",
        _LEGS,
        "Failure.ABANDONED if hand.failed else None",
        "None",
        _turns("test_a_200_that_says_error_counts_as_a_failure"),
    ),
    Mutant(
        "keep-fresh-handle-that-is-odd",
        _CHANCES,
        "            self._owner.give_back(grant.source)\n",
        "",
        _chances(
            "test_a_handle_that_is_no_object_is_released",
            "test_a_handle_that_is_not_shorter_than_the_prompt_is_released",
        ),
    ),
    Mutant(
        "send-stock-engines-the-clients-words",
        _CHANCES,
        "harvest.token_ids if way.reader.node.stock else None",
        "None",
        _chances("test_a_prefill_engine_without_the_connector_is_given_the_prompts_very_tokens"),
    ),
    Mutant(
        "send-tokens-that-are-not-certain",
        _CHANCES,
        "certain = tokens_certain(body) and not any(",
        "certain = not any(",
        _chances("test_no_tokens_are_sent_of_which_it_is_not_certain_that_they_are_the_prompts"),
    ),
    Mutant(
        "read-from-other-weights",
        _PLANNER,
        "if target.node.stock and same_weights(target.node, holder.node)",
        "if target.node.stock",
        _chances("test_what_cannot_be_read_or_named_by_its_tokens_is_not_asked_for"),
    ),
    Mutant(
        "pass-a-clients-session-on",
        _SHAPES,
        "_REQUEST_ID, _SESSION)",
        "_REQUEST_ID)",
        (
            "tests/unit/router/test_legs.py::test_params_cannot_be_smuggled_in_as_extra_arguments",
            "tests/unit/router/test_legs.py::test_the_prefill_leg_leaves_it_out",
        ),
    ),
)
