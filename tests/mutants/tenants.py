"""Mutants of what lets callers in, and of what keeps them apart."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/router/src/backhaul_router"
_UNIT, _INTEGRATION = "tests/unit/router", "tests/integration"
_TENANTS, _JWT, _TURNS = f"{_UNIT}/test_tenants.py", f"{_UNIT}/test_jwt_tokens.py", f"{_UNIT}/test_turns.py"
_FILE, _RUNNING = f"{_UNIT}/test_tenants_file.py", f"{_INTEGRATION}/test_router_tenants.py"
_NO_KEYS = f"{_TENANTS}::test_a_file_that_is_no_list_of_hashes_is_refused_without_repeating_keys"
_SAID = f"{_JWT}::test_a_token_for_others_or_without_what_is_needed_is_refused"
_SAME = (
    f"{_RUNNING}::test_what_is_asked_answered_and_done_is_the_same_whether_or_not_another_tenant_has_the_conversation"
)

MUTANTS = (
    # Keys
    Mutant(
        "compare-keys-until-one-fits",
        f"{_SOURCE}/core/tenants.py",
        "found = [tenant for known, tenant in self.keys if hmac.compare_digest(known, digest)]",
        'found = [next((tenant for known, tenant in self.keys if hmac.compare_digest(known, digest)), "")]',
        (f"{_TENANTS}::test_every_known_key_is_compared_in_constant_time_whichever_is_given",),
    ),
    Mutant(
        "compare-keys-byte-by-byte",
        f"{_SOURCE}/core/tenants.py",
        "if hmac.compare_digest(known, digest)]",
        "if known == digest]",
        (f"{_TENANTS}::test_every_known_key_is_compared_in_constant_time_whichever_is_given",),
    ),
    Mutant("let-no-key-in", f"{_SOURCE}/core/tenants.py", "if _NO_KEY in digests:", "if False:", (_NO_KEYS,)),
    Mutant(
        "repeat-what-may-be-a-key",
        f"{_SOURCE}/core/tenants.py",
        'repr(key) if _SETTING.fullmatch(key) else "a setting"',
        "repr(key)",
        (_NO_KEYS,),
    ),
    Mutant(
        "hash-what-can-be-guessed",
        f"{_SOURCE}/keys.py",
        "if len(key) < _SHORTEST or len(set(key)) < _SHORTEST // 4:",
        "if not key:",
        (f"{_UNIT}/test_keys.py::test_what_somebody_could_guess_is_refused_and_not_repeated",),
    ),
    # Tokens
    Mutant(
        "take-unsigned-tokens",
        f"{_SOURCE}/jwt_tokens.py",
        'options={"require": self._required}',
        'options={"require": self._required, "verify_signature": False}',
        (
            f"{_JWT}::test_a_token_that_nobody_signed_is_refused",
            f"{_JWT}::test_a_public_key_is_never_taken_for_a_shared_secret",
            f"{_JWT}::test_a_changed_token_is_refused",
        ),
    ),
    Mutant(
        "take-signatures-that-anybody-can-make",
        f"{_SOURCE}/jwt_tokens.py",
        '"ES512", "EdDSA")',
        '"ES512", "EdDSA", "HS256")',
        (f"{_JWT}::test_a_public_key_is_never_taken_for_a_shared_secret",),
    ),
    Mutant(
        "keep-secrets-of-issuers",
        f"{_SOURCE}/jwt_tokens.py",
        'if entry.get("kty") == "oct" or "d" in entry or "k" in entry:',
        "if False:",
        (f"{_JWT}::test_a_keys_file_with_anything_odd_is_refused_and_nothing_of_it_repeated",),
    ),
    Mutant(
        "any-key-for-any-token",
        f"{_SOURCE}/jwt_tokens.py",
        "if kid is None and len(self._keys) == 1:",
        "if self._keys:",
        (f"{_JWT}::test_a_signature_counts_only_with_the_key_that_the_token_names",),
    ),
    Mutant(
        "use-keys-for-encryption",
        f"{_SOURCE}/jwt_tokens.py",
        'if entry.get("use", "sig") != "sig" or',
        "if",
        (f"{_JWT}::test_keys_of_other_kinds_are_left_out",),
    ),
    Mutant(
        "take-tokens-for-ever",
        f"{_SOURCE}/jwt_tokens.py",
        '("exp", "iss", "aud", settings.tenant_claim)',
        '("iss", "aud", settings.tenant_claim)',
        (_SAID,),
    ),
    Mutant(
        "take-tokens-of-any-issuer",
        f"{_SOURCE}/jwt_tokens.py",
        "issuer=self._settings.issuer,",
        "issuer=None,",
        (_SAID,),
    ),
    Mutant(
        "take-tokens-for-anybody",
        f"{_SOURCE}/jwt_tokens.py",
        'options={"require": self._required}',
        'options={"require": self._required, "verify_aud": False}',
        (_SAID,),
    ),
    # The file changes
    Mutant(
        "keep-who-is-gone",
        f"{_SOURCE}/tenants_file.py",
        "self._tenants = await asyncio.to_thread(self._load)",
        "await asyncio.to_thread(self._load)",
        (f"{_FILE}::test_who_is_new_is_let_in_and_who_is_gone_is_refused",),
    ),
    Mutant(
        "end-with-a-broken-file",
        f"{_SOURCE}/tenants_file.py",
        "except Exception as error:",
        "except OSError as error:",
        (f"{_FILE}::test_a_file_that_cannot_be_used_changes_nothing_and_is_told_of_once",),
    ),
    Mutant(
        "begin-for-who-is-gone",
        f"{_SOURCE}/turns.py",
        "        self._tenants.check(request.tenant)\n",
        "",
        (f"{_TURNS}::test_a_turn_whose_tenant_is_gone_by_the_time_it_begins_is_refused",),
    ),
    # Apart
    Mutant(
        "one-scope-for-all-tenants",
        f"{_SOURCE}/core/scopes.py",
        "return scope_of(model=model, cache_salt=self.salt(tenant, client_salt), tenant=tenant)",
        'return scope_of(model=model, cache_salt=client_salt, tenant="")',
        (f"{_TURNS}::test_tenants_share_neither_scope_nor_salt", f"{_SAME}[over_http]", f"{_SAME}[by_delete]"),
    ),
    Mutant(
        "one-salt-for-all-tenants",
        f"{_SOURCE}/core/salt.py",
        'for part in (tenant.encode(), client_salt.encode("utf-8", "surrogatepass")):',
        'for part in (client_salt.encode("utf-8", "surrogatepass"),):',
        (
            f"{_TENANTS}::test_salts_differ_by_tenant_by_client_salt_and_by_cluster",
            f"{_TURNS}::test_tenants_share_neither_scope_nor_salt",
        ),
    ),
    Mutant(
        "know-other-tenants-prompts",
        f"{_SOURCE}/choosing.py",
        'Prefix(f"{turn.scope}:{beginning.digest}"',
        "Prefix(beginning.digest",
        (f"{_UNIT}/test_choosing.py::test_tenants_know_nothing_of_what_is_cached_of_one_another",),
    ),
    Mutant(
        "share-media-by-name",
        f"{_SOURCE}/turns.py",
        "            check_media(body.fields)\n",
        "            pass\n",
        (f"{_TURNS}::test_tenants_do_not_name_what_engines_keep_of_media",),
    ),
    Mutant(
        "pass-tenants-keys-on",
        f"{_SOURCE}/turns.py",
        "if authorization and not self._tenants.configured else",
        "if authorization else",
        (f"{_TURNS}::test_engines_get_the_configured_key_or_the_clients_own",),
    ),
)
