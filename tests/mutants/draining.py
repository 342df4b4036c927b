"""Mutants of what happens to a node that is drained."""

from tests.mutants.mutant import Mutant

_DRAINING = "services/node-agent/src/backhaul_node_agent/core/draining.py"
_DRAIN = "services/node-agent/src/backhaul_node_agent/drain.py"
_OWNER = "services/node-agent/src/backhaul_node_agent/core/owner.py"
_SESSION = "services/node-agent/src/backhaul_node_agent/node_session.py"
_NODES = "services/router/src/backhaul_router/core/nodes.py"


def _draining(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/node_agent/test_draining.py::{name}" for name in names)


def _nodes(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/router/test_nodes.py::{name}" for name in names)


MUTANTS = (
    Mutant(
        "leave-while-a-stream-runs",
        _DRAINING,
        "idle = load.request_count == 0 and load.asked_at >= self._settled_at",
        "idle = load.asked_at >= self._settled_at",
        _draining("test_a_node_leaves_when_nothing_runs_and_nothing_is_held_and_at_its_deadline_in_any_case"),
    ),
    Mutant(
        "leave-before-routers-have-heard",
        _DRAINING,
        "idle = load.request_count == 0 and load.asked_at >= self._settled_at",
        "idle = load.request_count == 0",
        _draining("test_engines_of_a_node_that_retires_must_be_seen_idle_after_routers_have_heard_of_it"),
    ),
    Mutant(
        "leave-while-sets-are-held",
        _DRAINING,
        "(idle and not held_count)",
        "idle",
        _draining("test_a_node_leaves_when_nothing_runs_and_nothing_is_held_and_at_its_deadline_in_any_case"),
    ),
    Mutant(
        "drain-for-ever",
        _DRAINING,
        "return now >= self._deadline or (idle and not held_count)",
        "return idle and not held_count",
        _draining("test_a_node_leaves_when_nothing_runs_and_nothing_is_held_and_at_its_deadline_in_any_case"),
    ),
    Mutant(
        "put-the-end-off",
        _DRAINING,
        "min(self._deadline, now + within_s)",
        "now + within_s",
        _draining("test_asking_again_brings_the_end_forward_and_never_puts_it_off"),
    ),
    Mutant(
        "leave-with-pointers",
        _DRAIN,
        "        await self._pointers.close(_GRACE_S)\n",
        "",
        (
            "tests/unit/node_agent/test_drain.py"
            "::test_a_node_ends_its_pointers_and_leaves_once_nothing_runs_and_nothing_is_held",
        ),
    ),
    Mutant(
        "left-before-the-lease-has-ended",
        _DRAIN,
        "        await self._membership.left.wait()\n",
        "",
        ("tests/unit/node_agent/test_drain.py::test_it_has_left_only_when_its_lease_has_ended",),
    ),
    Mutant(
        "join-again-after-leaving",
        _SESSION,
        "        if self._leaving and not self._holding:\n            self.left.set()\n",
        "",
        (
            "tests/contract/test_owner_drain.py"
            "::test_a_drained_node_that_no_registry_answers_has_left_when_its_lease_has_ended",
        ),
        fixtures=True,
    ),
    Mutant(
        "wait-for-engines-that-are-away",
        _OWNER,
        "for engine in self._held.engines.values() if engine.connected for life",
        "for engine in self._held.engines.values() for life",
        (
            "tests/unit/node_agent/test_owner.py"
            "::test_a_drain_waits_for_no_set_that_nobody_reads_and_whose_engine_cannot_be_told_or_is_away",
        ),
    ),
    Mutant(
        "retired-orphan",
        _NODES,
        "            if node is not None and node.usable:\n",
        "            if node is not None and node.state is not NodeState.NOT_READY:\n",
        _nodes("test_a_node_that_retires_gets_no_turns_while_it_drains_nor_when_it_has_left"),
    ),
    Mutant(
        "turns-for-the-retiring",
        _NODES,
        "(self.state is NodeState.DRAINING and not self.retiring)",
        "self.state is NodeState.DRAINING",
        _nodes("test_a_node_that_retires_gets_no_turns_while_it_drains_nor_when_it_has_left"),
    ),
    Mutant(
        "refuse-while-an-agent-ends",
        _NODES,
        "return self.state is NodeState.READY or (self.state is NodeState.DRAINING and not self.retiring)",
        "return self.state is NodeState.READY",
        _nodes("test_an_engine_whose_agent_leaves_in_good_order_serves_on_where_no_ready_one_can"),
    ),
)
