"""Mutants of who is let in, who is talked to, and what new files do."""

from tests.mutants.mutant import Mutant

_TLS = "services/common/src/backhaul_common/tls"
_FILES, _CHANNELS, _CONTEXTS, _CALLERS, _IDENTITY = (
    f"{_TLS}/{name}.py" for name in ("files", "channels", "contexts", "callers", "identity")
)
_SETTINGS, _CLIENT = f"{_TLS}/settings.py", "services/common/src/backhaul_common/grpc_client.py"
_REGISTRY, _ROUTER = "services/registry/src/backhaul_registry/app.py", "services/router/src/backhaul_router/app.py"
_SERVERS = "services/router/src/backhaul_router/grpc_servers.py"


def _unit(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/common/tls/test_{module}.py::{name}" for name in names)


def _over(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/tls/test_{module}.py::{name}" for name in names)


MUTANTS = (
    Mutant(
        "call-without-a-certificate",
        _CHANNELS,
        "require_client_authentication=bool(given.ca)",
        "require_client_authentication=False",
        _over("grpc", "test_a_caller_that_cannot_prove_itself_is_refused"),
    ),
    Mutant(
        "ask-over-http-without-a-certificate",
        _CONTEXTS,
        "context.verify_mode = ssl.CERT_REQUIRED",
        "context.verify_mode = ssl.CERT_OPTIONAL",
        _unit("contexts", "test_only_who_shows_a_certificate_of_the_ca_is_let_in"),
    ),
    Mutant(
        "let-clients-in-by-the-services-ca",
        _ROUTER,
        'configured.identity("clients", config.client_files)',
        'configured.identity("clients", config.tls_files)',
        _over("router", "test_turns_are_cold_and_warm_as_ever"),
    ),
    Mutant(
        "believe-any-engine",
        _CONTEXTS,
        "    show(context, material)\n    return context\n\n\ndef _listener",
        "    show(context, material)\n    context.check_hostname = False\n    context.verify_mode = ssl.CERT_NONE\n"
        "    return context\n\n\ndef _listener",
        _over("router", "test_an_engine_that_cannot_prove_itself_gets_nothing"),
    ),
    Mutant(
        "call-whoever-is-there",
        _CLIENT,
        "options = (*CHANNEL_OPTIONS, *name_options(name))",
        "options = CHANNEL_OPTIONS",
        _over("grpc", "test_a_name_replaces_the_host"),
    ),
    Mutant(
        "accept-any-name",
        _CALLERS,
        "    if names.isdisjoint(accepted):",
        "    if not names:",
        _over(
            "grpc",
            "test_only_callers_with_an_accepted_name_are_let_in",
            "test_single_methods_have_callers_of_their_own",
        ),
    ),
    Mutant(
        "publish-as-a-router",
        _REGISTRY,
        'AGENTS_METHODS = ("JoinNode", "PublishBlockSets")',
        'AGENTS_METHODS = ("JoinNode",)',
        _over("services", "test_nobody_does_what_others_are_for"),
        fixtures=True,
    ),
    Mutant(
        "pick-for-any-caller",
        _SERVERS,
        "tls=tls,\n        callers=config.tls_callers,\n    )\n    ext_proc",
        "tls=tls,\n    )\n    ext_proc",
        _over("router", "test_only_gateways_of_an_accepted_name_have_endpoints_picked"),
    ),
    Mutant(
        "plan-for-any-caller",
        _SERVERS,
        "tls=tls,\n        callers=config.tls_callers,\n    )\n    gateway",
        "tls=tls,\n    )\n    gateway",
        _over("router", "test_only_gateways_of_an_accepted_name_have_turns_planned"),
    ),
    Mutant(
        "half-a-certificate",
        _SETTINGS,
        "if any(given) and not all(given):",
        "if False:",
        _unit("settings", "test_certificate_key_and_ca_go_together"),
    ),
    Mutant(
        "take-files-before-they-fit",
        _IDENTITY,
        "            self._problem = error.message\n            return\n",
        "            self._problem = error.message\n            material = Material()\n",
        _unit("identity", "test_a_certificate_without_its_key_is_taken_when_the_key_is_there"),
    ),
    Mutant(
        "take-what-has-expired",
        _FILES,
        "    if own.not_valid_after_utc <= now:",
        "    if False:",
        _unit("identity", "test_a_service_does_not_start_with_what_it_cannot_use"),
    ),
    Mutant(
        "show-callers-the-old-certificate",
        _CHANNELS,
        "        if identity.material is given:",
        "        if given:",
        _over("grpc", "test_a_server_shows_and_trusts_what_is_in_force_and_keeps_its_connections"),
    ),
    Mutant(
        "call-under-the-old-certificate",
        _CHANNELS,
        "        if material is not self._material:",
        "        if material is None:",
        _over("grpc", "test_calls_go_out_under_the_certificate_that_is_in_force_and_what_runs_goes_on"),
    ),
    Mutant(
        "cut-off-what-runs",
        _CHANNELS,
        "        asyncio.get_running_loop().call_later(LAST_CALLS_S, self._replaced.discard, self._channel)",
        "        self._closing = asyncio.get_running_loop().create_task(self._channel.close())",
        _over("grpc", "test_calls_under_load_survive_one_new_certificate_after_the_other"),
    ),
    Mutant(
        "trust-the-old-ca-over-http",
        _CONTEXTS,
        "        connection.context = self._context",
        "        connection.context = front",
        _unit("contexts", "test_each_handshake_is_under_what_is_in_force"),
    ),
    Mutant(
        "take-up-sessions",
        _CONTEXTS,
        "        context.minimum_version = ssl.TLSVersion.TLSv1_3\n",
        "",
        _unit("contexts", "test_where_certificates_are_needed_no_session_can_be_taken_up_without_one"),
    ),
    Mutant(
        "look-at-files-once",
        _IDENTITY,
        "        if state != self._seen or self._problem:",
        "        if self._problem:",
        _unit("identity", "test_a_new_certificate_is_taken"),
    ),
)
