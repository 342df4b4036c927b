"""Mutants of what the connector proves on the prefill side."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/node-agent/connector/src/backhaul_connector"
_TESTS = "tests/unit/connector"

MUTANTS = (
    Mutant(
        "skip-proof",
        f"{_SOURCE}/prefill.py",
        "verified = verified_count(anchors, prompt.tokens, prompt.extras or ())",
        "verified = anchors.token_count",
        (f"{_TESTS}/test_prefill.py::test_a_handle_for_another_continuation_is_cut_to_the_common_start",),
    ),
    Mutant(
        "keep-all-blocks",
        f"{_SOURCE}/prefill.py",
        "ids = [group[:blocks] for group in handle.remote_block_ids]",
        "ids = [group[:] for group in handle.remote_block_ids]",
        (f"{_TESTS}/test_prefill.py::test_what_is_kept_is_proved_and_has_exactly_the_blocks_that_it_needs",),
    ),
    Mutant(
        "ignore-identity",
        f"{_SOURCE}/prefill.py",
        'return "" if anchors.identity == prompt.identity else "identity"',
        'return ""',
        (f"{_TESTS}/test_prefill.py::test_nothing_is_verified_for_another_identity",),
    ),
    Mutant(
        "accept-late-reads",
        f"{_SOURCE}/fence.py",
        "in_time = remaining is not None and remaining > 0",
        "in_time = remaining is not None",
        (f"{_TESTS}/test_fence.py::test_a_read_that_does_not_certainly_complete_in_time_fails_with_its_blocks",),
    ),
)
