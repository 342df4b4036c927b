"""Mutants of which nodes count as well, and how much is repeated."""

from tests.mutants.mutant import Mutant

_HEALTH = "services/router/src/backhaul_router/core/health"
_CIRCUIT, _BREAKERS = f"{_HEALTH}/circuit.py", f"{_HEALTH}/breakers.py"
_RETRIES = f"{_HEALTH}/retries.py"
_FILTERS = "services/router/src/backhaul_router/core/routing/filters"
_TESTS = "tests/unit/router/health"


def _breakers(*names: str) -> tuple[str, ...]:
    return tuple(f"{_TESTS}/test_breakers.py::{name}" for name in names)


def _outliers(*names: str) -> tuple[str, ...]:
    return tuple(f"{_TESTS}/test_outliers.py::{name}" for name in names)


MUTANTS = (
    Mutant(
        "never-open",
        _BREAKERS,
        "        elif circuit.fails_whole(failure):\n",
        "        elif False:\n",
        _breakers(
            "test_what_no_request_can_bring_about_counts_at_once",
            "test_faults_count_only_when_several_come_in_a_row",
        ),
    ),
    Mutant(
        "open-for-what-requests-bring-about",
        _CIRCUIT,
        "return failure in _AT_ONCE or ",
        "return True or ",
        _breakers("test_faults_count_only_when_several_come_in_a_row"),
    ),
    Mutant(
        "never-half-open",
        _CIRCUIT,
        "return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN",
        "return BreakerState.OPEN",
        _breakers("test_what_no_request_can_bring_about_counts_at_once"),
    ),
    Mutant(
        "never-probe",
        _CIRCUIT,
        "return now < self._until or now < self._probing_until",
        "return True",
        _breakers("test_one_request_at_a_time_is_the_probe_and_the_next_one_goes_when_nothing_is_heard_of_it"),
    ),
    Mutant(
        "probe-with-everything",
        _CIRCUIT,
        "return now < self._until or now < self._probing_until",
        "return now < self._until",
        _breakers("test_one_request_at_a_time_is_the_probe_and_the_next_one_goes_when_nothing_is_heard_of_it"),
    ),
    Mutant(
        "open-for-the-same-time-again",
        _CIRCUIT,
        "        self._ejections += 1\n",
        "",
        _breakers("test_each_further_failure_doubles_the_time_up_to_a_limit"),
    ),
    Mutant(
        "back-at-full-load",
        _CIRCUIT,
        "        self._starting_until = now + self._settings.slow_start_s\n        self._answers",
        "        self._answers",
        _breakers("test_the_share_of_a_node_that_is_well_again_grows"),
    ),
    Mutant(
        "bear-a-share-of-faults",
        _BREAKERS,
        "        elif circuit.fails_often(now) and ",
        "        elif False and ",
        _outliers("test_a_node_with_a_share_of_faults_beyond_its_peers_is_ejected_and_no_answer_refutes_that"),
    ),
    Mutant(
        "any-answer-refutes-a-share-of-faults",
        _CIRCUIT,
        "        elif not self.by_share:\n",
        "        else:\n",
        _outliers("test_a_node_with_a_share_of_faults_beyond_its_peers_is_ejected_and_no_answer_refutes_that"),
    ),
    Mutant(
        "judge-without-peers",
        _BREAKERS,
        "and self._outlier(circuit, node, now) and",
        "and",
        _outliers(
            "test_without_peers_that_show_better_it_is_none",
            "test_a_pool_that_fails_alike_goes_on_with_nearly_all_of_its_nodes",
        ),
    ),
    Mutant(
        "empty-the-pool",
        _BREAKERS,
        " and self._spared(node):\n",
        ":\n",
        _outliers(
            "test_at_most_half_of_a_pool_is_ejected_for_its_share_of_faults",
            "test_the_only_node_of_a_model_is_not_ejected_for_its_share_of_faults",
        ),
    ),
    Mutant(
        "serve-nobody-when-all-fail",
        f"{_FILTERS}/healthy.py",
        "if target.node.node_id not in avoided] or targets",
        "if target.node.node_id not in avoided]",
        ("tests/unit/router/routing/filters/test_healthy.py::test_nodes_to_avoid_are_used_when_there_is_no_other",),
    ),
    Mutant(
        "serve-nobody-when-all-were-tried",
        f"{_FILTERS}/untried.py",
        "if target.node.node_id not in demand.tried] or targets",
        "if target.node.node_id not in demand.tried]",
        (
            "tests/unit/router/routing/filters/test_untried.py"
            "::test_nodes_that_failed_this_turn_are_used_when_there_is_no_other",
        ),
    ),
    Mutant(
        "repeat-everything",
        _RETRIES,
        "if self._retries.total(now) >= SHARE * self._turns.total(now) + SPARE:",
        "if False:",
        (
            f"{_TESTS}/test_retries.py::test_a_router_with_few_turns_may_repeat_some",
            f"{_TESTS}/test_retries.py::test_a_pool_that_fails_every_leg_gets_a_fifth_more_and_no_storm",
        ),
    ),
    Mutant(
        "repeat-for-turns-of-long-ago",
        f"{_HEALTH}/windows.py",
        "            self._total -= self._slots.popleft()[1]\n",
        "            self._slots.popleft()\n",
        (f"{_TESTS}/test_retries.py::test_turns_of_long_ago_allow_nothing",),
    ),
    Mutant(
        "each-turn-that-fails-together-doubles-the-time",
        f"{_HEALTH}/pairs.py",
        "        if mark is not None and now < mark.until:\n            return 0.0\n",
        "",
        (f"{_TESTS}/test_pairs.py::test_turns_that_fail_together_count_once",),
    ),
    Mutant(
        "read-again-from-who-could-not-be-read",
        f"{_HEALTH}/pairs.py",
        "        return self._apart(one, other) or self._apart(other, one)",
        "        return False",
        (
            "tests/unit/router/test_turns.py"
            "::test_a_prefill_engine_that_cannot_read_from_a_holder_is_not_asked_again_for_a_while",
            "tests/unit/router/test_turns.py::test_a_request_that_worked_in_the_end_shows_that_the_pair_was_to_blame",
        ),
    ),
)
