"""Mutants of what keeps decode from reading blocks that prefill has freed."""

from tests.mutants.mutant import Mutant

_CONNECTOR = "services/node-agent/connector/src/backhaul_connector"
_ATTEMPTS = "services/router/src/backhaul_router/attempts.py"
_SIMULATED = "tests/unit/simulator/test_connector.py"
_TURNS = "tests/unit/router/test_turns.py"

MUTANTS = (
    Mutant(
        "hand-offs-without-deadline",
        f"{_CONNECTOR}/connector.py",
        'params = {**params, "remote_blocks_expiry_time": deadline}',
        "pass",
        (
            f"{_SIMULATED}::test_a_hand_off_says_until_when_its_blocks_are_certainly_kept",
            f"{_SIMULATED}::test_a_hand_off_whose_lease_is_over_is_not_read",
        ),
        fixtures=True,
    ),
    Mutant(
        "hand-offs-kept-longer-than-they-are",
        f"{_CONNECTOR}/scheduler.py",
        "return now + self._lease_s",
        "return now + 4 * self._lease_s",
        (f"{_SIMULATED}::test_a_hand_off_says_until_when_its_blocks_are_certainly_kept",),
        fixtures=True,
    ),
    Mutant(
        "reuse-with-short-leases",
        f"{_CONNECTOR}/engine.py",
        "if lease_s(config) < MIN_LEASE_S:",
        "if False:",
        ("tests/unit/connector/test_engine.py::test_any_other_says_what_to_set",),
    ),
    Mutant(
        "hand-over-unread-blocks-again",
        _ATTEMPTS,
        'return unread and self._policy.prefill_fallback == "decode"',
        "return False",
        (
            f"{_TURNS}::test_the_only_decode_engine_is_asked_again_when_the_blocks_may_be_why_it_failed",
            f"{_TURNS}::test_blocks_that_no_decode_engine_can_read_fail_no_turn",
        ),
    ),
)
