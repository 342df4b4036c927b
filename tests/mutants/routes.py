"""Mutants of which route a turn takes, and of what is left of it when that fails."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/router/src/backhaul_router"
_PLANNER, _CHOOSING = f"{_SOURCE}/core/routing/planner.py", f"{_SOURCE}/choosing.py"
_REACH = f"{_SOURCE}/core/routing/reach.py"
_ATTEMPTS, _LEGS, _TURNS = f"{_SOURCE}/attempts.py", f"{_SOURCE}/legs.py", f"{_SOURCE}/turns.py"


def _routes(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/router/test_routes.py::{name}" for name in names)


MUTANTS = (
    Mutant(
        "append-without-a-label",
        _LEGS,
        "turn.labelled = bool(keys) and target.reuse\n",
        "turn.labelled = bool(keys) and target.reuse and handed.params is not None\n",
        _routes("test_the_next_turn_finds_what_an_appended_one_leaves"),
    ),
    Mutant(
        "append-anywhere",
        _PLANNER,
        "Plan(Route.APPEND, None, demand.held.holder, ",
        "Plan(Route.APPEND, None, self._reach.able(Role.DECODE, demand.model)[-1], ",
        _routes(
            "test_the_holder_alone_is_asked_for_what_is_new_and_nothing_is_claimed",
            "test_an_append_is_for_the_very_engine_that_holds",
        ),
    ),
    Mutant(
        "remember-who-can-exchange-for-ever",
        _REACH,
        "if self._version != self._table.version:",
        "if False:",
        ("tests/unit/router/routing/test_reach.py::test_what_the_table_says_now_counts",),
    ),
    Mutant(
        "take-a-changed-partner-for-the-same",
        _REACH,
        "if known is None or not _same(known[0], partners):",
        "if known is None:",
        ("tests/unit/router/routing/test_reach.py::test_a_partner_that_has_changed_is_another_one",),
    ),
    Mutant(
        "append-unproved",
        _PLANNER,
        "        if not held.proved:\n",
        "        if False:\n",
        _routes("test_what_only_a_session_id_led_to_is_read_where_it_is_verified_and_not_appended"),
    ),
    Mutant(
        "append-however-much-is-new",
        _PLANNER,
        "demand.token_count - demand.held_tokens > self._limits.append_tokens",
        "False",
        _routes("test_a_holder_does_not_compute_more_than_it_may"),
    ),
    Mutant(
        "use-a-holder-that-fails",
        _PLANNER,
        "        if self._well(holder.node):\n",
        "        if True:\n",
        _routes("test_a_holder_that_fails_is_left_alone_while_another_node_is_well"),
    ),
    Mutant(
        "append-though-it-is-off",
        _PLANNER,
        "if Route.APPEND not in self._policy.routes or ",
        "if ",
        _routes("test_a_route_that_is_off_is_not_taken"),
    ),
    Mutant(
        "read-though-it-is-off",
        _PLANNER,
        "if Route.WARM not in self._policy.routes or ",
        "if ",
        _routes("test_a_route_that_is_off_is_not_taken"),
    ),
    Mutant(
        "go-to-a-holder-that-granted-nothing",
        _CHOOSING,
        "await self._do_without(turn, found, grant, None)",
        "await self._do_without(turn, found, grant, plan)",
        _routes("test_a_turn_whose_claim_is_refused_goes_where_a_cold_one_goes"),
    ),
    Mutant(
        "count-on-what-was-held",
        f"{_SOURCE}/running_turn.py",
        "replace(self.demand, held=None, tried=frozenset(self.tried))",
        "replace(self.demand, tried=frozenset(self.tried))",
        _routes("test_an_append_that_fails_is_repeated_cold_as_if_nothing_was_held"),
    ),
    Mutant(
        "go-the-way-that-failed",
        _ATTEMPTS,
        "        turn.warm = turn.plan = None\n",
        "        turn.warm = None\n",
        (
            *_routes("test_an_append_that_fails_is_repeated_cold_as_if_nothing_was_held"),
            "tests/unit/router/test_turns.py::test_a_cold_leg_that_may_work_elsewhere_is_tried_there_once",
        ),
    ),
    Mutant(
        "any-rank-for-prefill",
        _LEGS,
        "self._headers(turn, target, span.headers),\n                    warm=",
        "{**turn.engine_headers, **span.headers},\n                    warm=",
        _routes("test_every_leg_says_which_engine_of_a_server_it_is_for"),
    ),
    Mutant(
        "any-rank-for-decode",
        _LEGS,
        "self._headers(turn, target, span.headers),\n                    again=",
        "{**turn.engine_headers, **span.headers},\n                    again=",
        _routes(
            "test_every_leg_says_which_engine_of_a_server_it_is_for",
            "test_an_append_is_for_the_very_engine_that_holds",
        ),
    ),
    Mutant(
        "repeat-prefill-without-limit",
        _ATTEMPTS,
        "self._others(turn, Role.PREFILL)):\n            return self._retries.allowed()\n",
        "self._others(turn, Role.PREFILL)):\n            return True\n",
        _routes("test_where_every_leg_fails_few_are_repeated"),
    ),
    Mutant(
        "repeat-decode-without-limit",
        _ATTEMPTS,
        "return handed.plan.route is Route.WARM or self._retries.allowed()",
        "return True",
        _routes("test_where_every_leg_fails_few_are_repeated"),
    ),
    Mutant(
        "forget-how-many-turns-there-are",
        _ATTEMPTS,
        "        self._retries.began()\n        for last",
        "        for last",
        _routes("test_where_every_leg_fails_few_are_repeated"),
    ),
    Mutant(
        "count-repeated-reads",
        _ATTEMPTS,
        "                turn.unread.append((node, turn.warm.holder.node))\n            return True\n",
        "                turn.unread.append((node, turn.warm.holder.node))\n"
        "            return self._retries.allowed()\n",
        _routes("test_a_shortcut_that_fails_is_repeated_however_much_was"),
    ),
    Mutant(
        "count-repeated-warm-turns",
        _ATTEMPTS,
        "return handed.plan.route is Route.WARM or self._retries.allowed()",
        "return self._retries.allowed()",
        _routes("test_a_shortcut_that_fails_is_repeated_however_much_was"),
    ),
    Mutant(
        "count-repeated-appends",
        _ATTEMPTS,
        "        if handed.plan.route is Route.APPEND:\n            return True\n",
        "        if handed.plan.route is Route.APPEND:\n            return self._retries.allowed()\n",
        _routes("test_a_shortcut_that_fails_is_repeated_however_much_was"),
    ),
    Mutant(
        "learn-from-prefill-that-failed",
        _LEGS,
        "            hand = hand_off(reply.body)\n",
        "            hand = hand_off(reply.body)\n            self._learn_prefill(turn, target, hand, seconds)\n",
        _routes("test_a_prefill_leg_that_fails_teaches_nothing"),
    ),
    Mutant(
        "learn-from-decode-that-failed",
        _LEGS,
        "            served_s = work.served()\n",
        "            served_s = work.served()\n"
        "            self._learn_decode(turn, handed, first_s=first_s, served_s=served_s)\n",
        _routes("test_a_decode_leg_that_fails_teaches_nothing"),
    ),
    Mutant(
        "explain-to-everybody",
        _TURNS,
        "TurnExplanation() if request.explain and self._policy.explain else None",
        "TurnExplanation() if request.explain else None",
        _routes("test_only_a_router_that_explains_and_is_asked_tells_why"),
    ),
    Mutant(
        "answer-any-question",
        _TURNS,
        "        if not self._policy.explain:\n",
        "        if False:\n",
        _routes("test_a_question_is_refused_where_nothing_is_explained_and_has_no_effect_elsewhere"),
    ),
)
