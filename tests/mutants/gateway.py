"""Mutants of what holds although a gateway sends the decode leg and moves the bytes."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/router/src/backhaul_router"
_SERVICE, _FORWARDING = f"{_SOURCE}/ext_proc_service.py", f"{_SOURCE}/forwarding.py"
_GATEWAY, _EXCHANGE = f"{_SOURCE}/core/gateway.py", f"{_SOURCE}/exchange.py"


def _turns(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_gateway_turns.py::{name}" for name in names)


def _unit(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/router/{module}.py::{name}" for name in names)


MUTANTS = (
    Mutant(
        "pass-clients-headers-to-engines",
        _GATEWAY,
        'return [name for name in names if not name.startswith((":", *_NOT_OURS))]',
        "return []",
        _unit("test_gateway", "test_engines_get_no_header_of_a_client_that_can_be_taken_away"),
    ),
    Mutant(
        "pass-engines-headers-to-clients",
        _GATEWAY,
        'return [name for name in names if not name.startswith((":", *_NOT_OURS, *_OF_ANSWERS))]',
        "return []",
        _unit("test_gateway", "test_clients_get_what_means_something_to_them"),
    ),
    Mutant(
        "answer-from-where-the-gateway-does-not-want",
        f"{_SOURCE}/core/routing/planner.py",
        "return [target for target in decodes if demand.admits(target.node)]",
        "return decodes",
        _unit("routing/test_planner", "test_only_decode_engines_that_the_gateway_names_answer_whoever_prefills"),
    ),
    Mutant(
        "append-where-the-gateway-does-not-want",
        f"{_SOURCE}/core/routing/planner.py",
        " or not demand.admits(holder.node)",
        "",
        _unit("routing/test_planner", "test_only_decode_engines_that_the_gateway_names_answer_whoever_prefills"),
    ),
    Mutant(
        "whole-answers-with-handles",
        _SERVICE,
        "messages.answer_body(forwarded.whole(body))",
        "messages.answer_body(body)",
        _turns("test_a_whole_answer_carries_no_handles_although_vllms_own_connector_puts_some_in"),
    ),
    Mutant(
        "release-what-is-being-read",
        _SERVICE,
        "        forwarded.taken()\n",
        "",
        _turns("test_a_hand_off_that_may_have_been_read_is_not_released"),
    ),
    Mutant(
        "keep-what-was-never-sent",
        _FORWARDING,
        "            turn.untold = self._untold\n",
        "            pass\n",
        _turns("test_a_decode_engine_that_refuses_connections_costs_one_turn_and_no_hand_off"),
    ),
    Mutant(
        "go-on-for-who-has-left",
        _EXCHANGE,
        "            self._scope.reschedule(0)\n",
        "            pass\n",
        _unit(
            "test_exchange",
            "test_what_is_attended_ends_when_the_stream_ends",
            "test_what_is_attended_ends_when_the_gateway_answers_by_itself",
        ),
    ),
    Mutant(
        "learn-nothing-of-what-gateways-send",
        _FORWARDING,
        "            self._attempts.sent_elsewhere(turn, self._handed, failure)\n",
        "            pass\n",
        _turns("test_of_what_another_engine_answers_nothing_is_learnt_about_the_one_that_was_picked"),
    ),
    Mutant(
        "blame-the-picked-engine-for-another",
        _FORWARDING,
        'if served in ("", self.endpoint):',
        "if True:",
        _turns("test_of_what_another_engine_answers_nothing_is_learnt_about_the_one_that_was_picked"),
    ),
    Mutant(
        "learn-of-the-picked-engine-from-another",
        f"{_SOURCE}/ext_proc_messages.py",
        'if expectation is None or (served is not None and served.string_value not in ("", expectation.endpoint)):',
        "if expectation is None:",
        _unit("test_forwarding", "test_of_any_other_answer_nothing_is"),
    ),
    Mutant(
        "learn-of-engines-that-are-gone",
        f"{_SOURCE}/access_log_service.py",
        ' or not (expectation.engine_id == "" or node.engine(expectation.engine_id))',
        "",
        _unit("test_forwarding", "test_of_an_engine_that_is_gone_nothing_is_learnt"),
    ),
    Mutant(
        "bear-with-engines-that-break-off-answers",
        f"{_SOURCE}/access_log_service.py",
        "            self._routing.live.breakers.failed(node, Failure.DISCONNECTED)\n",
        "",
        (
            *_turns("test_an_engine_that_breaks_off_an_answer_is_avoided"),
            *_unit("test_forwarding", "test_an_engine_that_broke_off_an_answer_is_avoided"),
        ),
    ),
)
