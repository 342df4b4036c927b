"""Mutants of what surrounds the agent's core, and of the registry."""

from tests.mutants.mutant import Mutant

_AGENT = "services/node-agent/src/backhaul_node_agent/agent.py"
_NODE = "services/node-agent/src/backhaul_node_agent/core/node.py"
_PUBLISHER = "services/node-agent/src/backhaul_node_agent/publisher.py"
_PUBLISHERS = "services/node-agent/src/backhaul_node_agent/publishers.py"
_INDEX = "services/registry/src/backhaul_registry/index_service.py"
_TESTS = "tests/unit/node_agent/test_agent.py"

MUTANTS = (
    Mutant(
        "answer-before-telling",
        _AGENT,
        "if not await self._connectors.flushed(request.engine_id, FLUSH_S):",
        "if not await self._connectors.flushed(request.engine_id, FLUSH_S) and False:",
        (f"{_TESTS}::test_a_claim_whose_connector_cannot_be_told_is_refused_and_taken_back",),
    ),
    Mutant(
        "answer-without-confirming",
        _AGENT,
        "            if refusal is not None:\n                raise _error(refusal)\n            answered",
        "            answered",
        (f"{_TESTS}::test_a_claim_is_not_answered_when_the_lease_ends_while_the_connector_is_told",),
    ),
    Mutant(
        "keep-unanswered-claim",
        _AGENT,
        "            if not answered:\n",
        "            if False:\n",
        (f"{_TESTS}::test_a_claim_whose_caller_has_gone_is_taken_back",),
    ),
    Mutant(
        "ready-before-purge",
        _NODE,
        "    if purging:\n",
        "    if False:\n",
        (
            "tests/contract/test_owner_node.py"
            "::test_pointers_of_a_restarted_engine_are_gone_before_the_node_is_ready_again",
        ),
    ),
    Mutant(
        "remove-once",
        _PUBLISHER,
        "self._dirty = dict.fromkeys([*self._removals, *self._wanted])",
        "self._dirty = dict.fromkeys(self._wanted)",
        ("tests/contract/test_owner_node.py::test_a_removal_that_was_never_acknowledged_is_sent_again",),
    ),
    Mutant(
        "keep-pointers-of-a-gone-engine",
        _PUBLISHERS,
        "            publisher.close()\n",
        "",
        (
            "tests/contract/test_owner_node.py"
            "::test_pointers_of_a_restarted_engine_are_gone_before_the_node_is_ready_again",
        ),
    ),
    Mutant(
        "registry-keeps-pointers",
        _INDEX,
        "            await stream.purge()\n",
        "            pass\n",
        ("tests/unit/registry/test_index_service.py::test_a_half_close_purges",),
        fixtures=True,
    ),
    Mutant(
        "registry-purges-after-a-break",
        _INDEX,
        "        if not context.cancelled():\n",
        "        if True:\n",
        ("tests/unit/registry/test_index_service.py::test_an_end_that_turns_out_to_be_a_break_does_not_purge",),
        fixtures=True,
    ),
    Mutant(
        "resume-on-another-history",
        "services/registry/src/backhaul_registry/core/feed.py",
        "self._digest_at(start_revision) != start_digest",
        "self._digest_at(start_revision) is None",
        ("tests/unit/registry/test_feed.py::test_a_client_that_knew_something_else_at_that_revision_starts_afresh",),
    ),
    Mutant(
        "count-on-a-lease-for-pointers",
        "services/registry/src/backhaul_registry/publishing.py",
        "                await self._check()\n",
        "",
        ("tests/unit/registry/test_publishing.py::test_what_etcd_no_longer_has_is_reported_although_the_lease_lives",),
        fixtures=True,
    ),
    Mutant(
        "write-on-after-a-loss",
        "services/registry/src/backhaul_registry/etcd_store.py",
        "self._etcd.txn([before], ops, [Get(key)], repeatable=True)",
        "self._etcd.txn([], ops, [Get(key)], repeatable=True)",
        ("tests/unit/registry/test_publishing.py::test_a_batch_after_a_loss_writes_nothing",),
        fixtures=True,
    ),
)
