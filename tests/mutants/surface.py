"""Mutants of the endpoints beside chats and completions: names of responses, what is passed on, what answers repeat."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/router/src/backhaul_router"
_UNIT, _INTEGRATION = "tests/unit/router", "tests/integration"
_PASSING = f"{_INTEGRATION}/test_router_passing.py"

MUTANTS = (
    Mutant(
        "stream-handles-in-responses",
        f"{_SOURCE}/core/clean_lines.py",
        "msgspec.Raw(without_params(inner))",
        "msgspec.Raw(inner)",
        (f"{_UNIT}/test_other_answers.py::test_no_event_of_a_response_carries_a_handle",),
    ),
    Mutant(
        "name-responses-for-anybody",
        f"{_SOURCE}/core/response_ids.py",
        "    for part in (engine_id, tenant, nonce):\n",
        "    for part in (engine_id, nonce):\n",
        (
            f"{_UNIT}/test_responses.py::test_a_name_leads_nowhere_for_another_tenant_or_after_a_restart",
            f"{_INTEGRATION}/test_router_responses.py::test_a_tenant_cannot_go_on_from_or_fetch_anothers_response",
        ),
    ),
    Mutant(
        "hand-off-to-the-servers-tools",
        f"{_SOURCE}/core/responses.py",
        'return "tools" if any(',
        'return "" if any(',
        (f"{_UNIT}/test_responses.py::test_what_one_engine_must_serve_alone",),
    ),
    Mutant(
        "pass-on-all-fields",
        f"{_SOURCE}/core/passing.py",
        "for_engine(self.raw, self.fields, salt)",
        "{**self.raw, **for_engine({}, {}, salt)}",
        (f"{_PASSING}::test_no_engine_is_told_what_only_a_router_may_tell",),
    ),
    Mutant(
        "pass-on-without-salt",
        f"{_SOURCE}/core/passing.py",
        "salt = cache_salt if self.path in _POOLING else",
        'salt = "" if self.path in _POOLING else',
        (f"{_PASSING}::test_tenants_are_kept_apart_where_prompts_are_cached",),
    ),
    Mutant(
        "pass-on-any-path",
        f"{_SOURCE}/http_service.py",
        'return self._routes.get(path, ("", None))',
        'return self._routes.get(path, ("POST", self._pass_on))',
        (f"{_PASSING}::test_everything_else_is_refused_and_reaches_no_engine",),
    ),
)
