"""Mutants of turns whose bytes a gateway moves."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/router/src/backhaul_router"
_PLANS, _PLANNED = f"{_SOURCE}/core/plans.py", f"{_SOURCE}/planned_turns.py"


def _plans(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/router/test_plans.py::{name}" for name in names)


def _planned(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/router/test_planned_turns.py::{name}" for name in names)


MUTANTS = (
    Mutant(
        "send-what-nobody-has-given-up-yet",
        _PLANS,
        "        if plan.deadline <= now:\n            # Nobody",
        "        if False:\n            # Nobody",
        _plans("test_it_is_too_late_to_send_although_nobody_has_looked_yet"),
    ),
    Mutant(
        "send-what-is-over",
        _PLANS,
        "        if end.how == step.value:\n",
        "        if True:\n",
        _plans(
            "test_a_turn_that_is_over_is_not_sent_and_ends_no_other_way",
            "test_a_turn_that_is_not_sent_in_time_is_given_up_and_must_not_be_sent",
        ),
    ),
    Mutant(
        "tell-of-any-tenants-turn",
        _PLANS,
        "if plan is None or plan.tenant != tenant:",
        "if plan is None:",
        _plans("test_other_tenants_turns_are_unknown_running_or_over"),
    ),
    Mutant(
        "free-what-a-gateway-sends",
        _PLANNED,
        "        planned.forwarded.taken()\n",
        "",
        _planned("test_what_may_have_been_sent_has_not"),
    ),
    Mutant(
        "count-for-ever-what-nobody-tells-of",
        _PLANNED,
        "        planned.forwarded.given_up()\n        await planned.stack.aclose()\n",
        "        planned.forwarded.given_up()\n",
        _planned(
            "test_a_turn_that_is_not_sent_in_time_is_given_up_with_all_that_it_has",
            "test_a_turn_of_which_nothing_is_told_any_more_stops_counting_and_keeps_its_hand_off",
        ),
    ),
)
