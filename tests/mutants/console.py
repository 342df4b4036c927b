"""Mutants of what the console tells, and to whom."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/router/src/backhaul_router"
_UNIT, _SERVED = "tests/unit/router/console", "tests/integration/test_router_console.py"

MUTANTS = (
    Mutant(
        "show-the-console-to-all",
        f"{_SOURCE}/console/service.py",
        'self._operators.check(request.headers.get("authorization"))',
        "pass",
        (f"{_SERVED}::test_data_is_for_holders_of_a_key_alone",),
    ),
    Mutant(
        "take-any-operators-key",
        f"{_SOURCE}/core/console/operators.py",
        'if scheme.lower() != "bearer" or not any(known):',
        'if scheme.lower() != "bearer":',
        (f"{_UNIT}/test_operators.py::test_nobody_else_is_let_in",),
    ),
    Mutant(
        "let-other-sites-read-along",
        f"{_SOURCE}/console/service.py",
        "if not local:",
        "if False:",
        (f"{_SERVED}::test_without_keys_pages_of_other_sites_cannot_read_along",),
    ),
    Mutant(
        "want-no-keys-where-others-reach-the-console",
        f"{_SOURCE}/config.py",
        "return loopback(self.listen_console) and not self.tenants_file",
        "return True",
        ("tests/unit/router/test_config.py::test_a_console_that_others_reach_wants_keys",),
    ),
    Mutant(
        "one-conversation-for-all-tenants",
        f"{_SOURCE}/core/console/journal.py",
        "if entry.scope == turn.scope]",
        "if entry.scope]",
        (f"{_UNIT}/test_journal.py::test_nothing_is_one_conversation_across_scopes",),
    ),
    Mutant(
        "look-in-scopes-of-no-tenant",
        f"{_SOURCE}/console/conversations.py",
        "if self._tenants and not question.tenant:",
        "if False:",
        (f"{_UNIT}/test_conversations.py::test_with_tenants_only_the_named_ones_or_remembered_turns_are_looked_in",),
    ),
    Mutant(
        "tell-passwords-of-engines",
        f"{_SOURCE}/core/console/views.py",
        'return join_address(parts.hostname or "", port or (443 if parts.scheme == "https" else 80))',
        "return parts.netloc",
        (f"{_UNIT}/test_state.py::test_the_names_and_passwords_in_engines_urls_are_not_told",),
    ),
)
