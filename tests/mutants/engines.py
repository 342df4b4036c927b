"""Mutants of the connector's hooks, which an engine shows: a simulated one, at the pace of `make test`."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/node-agent/connector/src/backhaul_connector"
_TESTS = "tests/e2e/connector"

MUTANTS = (
    Mutant(
        "track-no-turn-of-decode-alone",
        f"{_SOURCE}/scheduler.py",
        '            params["do_remote_prefill"] = True\n',
        "            pass\n",
        # Its blocks stay pinned until the engine ends: no second test can start.
        (f"{_TESTS}/test_decode.py::test_a_turn_of_the_decode_engine_alone_can_be_released[simulated]",),
        fixtures=True,
    ),
    Mutant(
        "promise-again-after-preemption",
        f"{_SOURCE}/connector.py",
        'if not (params.get("do_remote_decode") and params.get("_remote_blocks_processed")):',
        "if True:",
        (
            f"{_TESTS}/test_prefill.py::test_a_preempted_request_that_had_read_remotely_finishes_with_the_right_text[simulated]",
        ),
        fixtures=True,
    ),
    Mutant(
        "drop-the-fences-word",
        f"{_SOURCE}/fence.py",
        "for req_id in completed & self._reads.keys():",
        "for req_id in set[str]():",
        (
            f"{_TESTS}/test_prefill.py::test_a_read_that_ends_after_its_deadline_fails_the_leg_and_caches_nothing[simulated]",
        ),
        fixtures=True,
    ),
)
