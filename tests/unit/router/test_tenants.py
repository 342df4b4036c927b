"""Keys, tenants and the salt between them."""

import contextlib
import hashlib
import hmac
from dataclasses import replace

import pytest

from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import TenantLimits
from backhaul_router.core.salt import salt_for
from backhaul_router.core.tenants import Tenants, parse_tenants
from backhaul_router.core.token_settings import TokenSettings


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


FILE = f"""
[tenants.red]
key_sha256 = ["{digest("red-1")}", "{digest("red-2")}"]
[tenants.blue]
key_sha256 = ["{digest("blue-1")}"]
"""


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [("Bearer red-1", "red"), ("Bearer red-2", "red"), ("bearer blue-1", "blue"), ("Bearer  blue-1 ", "blue")],
)
def test_a_key_belongs_to_its_tenant(authorization: str, tenant: str) -> None:
    assert parse_tenants(FILE).authenticate(authorization) == tenant


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer x", "Basic red-1", "red-1", "Bearer \udcff"])
def test_anything_else_is_401(authorization: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_tenants(FILE).authenticate(authorization)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_every_known_key_is_compared_in_constant_time_whichever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    really = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return really(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    tenants = parse_tenants(FILE)
    known = [digest for digest, _ in tenants.keys]
    for key in ("red-1", "blue-1", "nobody's"):
        compared.clear()
        with contextlib.suppress(ApiError):
            tenants.authenticate(f"Bearer {key}")
        assert compared == [(each, bytes.fromhex(digest(key))) for each in known]


def test_a_tenant_that_is_known_no_more_is_refused() -> None:
    tenants = parse_tenants(FILE)
    tenants.check("red")
    for gone in ("green", ""):
        with pytest.raises(ApiError) as caught:
            tenants.check(gone)
        assert caught.value.status == 401
    Tenants().check("")


def test_a_tenant_may_have_limits_and_has_none_by_default() -> None:
    limited = f"""
    [tenants.red]
    key_sha256 = ["{digest("red-1")}"]
    max_turns = 8
    max_queued = 0
    priority = -100
    [tenants.blue]
    key_sha256 = ["{digest("blue-1")}"]
    """
    limits = parse_tenants(limited).limits
    assert limits == {"red": TenantLimits(max_turns=8, max_queued=0, priority=-100), "blue": TenantLimits()}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("max_turns = 0", "max_turns must be a whole number from 1"),
        ("max_turns = true", "max_turns must be a whole number"),
        ("max_turns = 1.0", "max_turns must be a whole number"),
        ("max_turns = '8'", "max_turns must be a whole number"),
        ("max_queued = -1", "max_queued must be a whole number from 0"),
        ("priority = 101", "priority must be a whole number from -100 to 100"),
        ("max_turn = 8", "'max_turn' is unknown; there are key_sha256, jwt_names, max_turns, max_queued, priority"),
    ],
)
def test_a_wrong_limit_is_named(line: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"tenant 'a': {told}"):
        parse_tenants(f"[tenants.a]\nkey_sha256 = ['{digest('k')}']\n{line}")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("keys = ['hunter2']", "'keys' is unknown; only hashes of keys belong here: backhaul-router-key makes"),
        ("api_key = 'hunter2'", "'api_key' is unknown; only hashes of keys belong here"),
        ("key_sha256 = ['hunter2']", "64 lower-case hex digits; only hashes of keys belong here: backhaul-router-key"),
        ("key_sha256 = 'hunter2'", "key_sha256 must be a list"),
        ("hunter2-hunter2 = 1", "a setting is unknown; there are key_sha256"),
        (f"key_sha256 = ['{digest('')}']", "that of no key at all"),
        ("jwt_names = ['hunter2']", "jwt_names need a table"),
        ("jwt_names = ['']", "names that are not empty"),
        ("jwt_names = 'hunter2'", "jwt_names must be a list"),
        ("key_sha256 = []", "must have key_sha256 = .* or jwt_names"),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_that_is_no_list_of_hashes_is_refused_without_repeating_keys(lines: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"tenant 'a': .*{told}|tenant 'a' {told}") as caught:
        parse_tenants(f"[tenants.a]\n{lines}")
    assert "hunter2" not in str(caught.value)


# Tokens

JWT = """
[jwt]
issuer = "https://login.example"
audience = ["backhaul"]
keys_file = "keys.json"
"""


class FakeTokens:
    """Tokens that are the names in them."""

    def name_in(self, token: str) -> str:
        return token.removeprefix("token-of-") if token.startswith("token-of-") else ""


def with_tokens(*tables: str) -> Tenants:
    return replace(parse_tenants("\n".join((JWT, *tables))), tokens=FakeTokens())


def test_a_token_belongs_to_the_tenant_that_lists_its_name() -> None:
    tenants = with_tokens(FILE, '[tenants.green]\njwt_names = ["green-app", "green-jobs"]')
    for name in ("green-app", "green-jobs"):
        assert tenants.authenticate(f"Bearer token-of-{name}") == "green"
    assert tenants.authenticate("Bearer red-1") == "red"
    for other in ("token-of-green", "token-of-red", "token-of-", "green-app"):
        with pytest.raises(ApiError) as caught:
            tenants.authenticate(f"Bearer {other}")
        assert caught.value.status == 401


def test_tokens_are_taken_only_where_the_file_says_whose() -> None:
    assert parse_tenants(FILE).token_settings is None
    assert with_tokens(FILE).token_settings == TokenSettings("https://login.example", ("backhaul",), "keys.json")
    tenants = parse_tenants(f"{JWT}\n[tenants.a]\njwt_names = ['a']")
    assert tenants.configured
    with pytest.raises(ApiError):
        tenants.authenticate("Bearer token-of-a")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("jwt = 1", "jwt must be a table"),
        ("[jwt]", "jwt: .*missing.*issuer"),
        (f"{JWT}secret = 'x'", "jwt: 'secret' is unknown; there are issuer, audience, keys_file"),
        (f"{JWT}leeway_s = 301", "jwt: .*leeway_s"),
        (f"{JWT}leeway_s = -1", "jwt: .*leeway_s"),
        (f"{JWT}tenant_claim = ''", "jwt: .*tenant_claim"),
        (JWT.replace('["backhaul"]', "[]"), "jwt: .*audience"),
        (JWT.replace('["backhaul"]', "'backhaul'"), "jwt: .*audience"),
        (f"{JWT}[tenants.b]\njwt_names = ['x']\n[tenants.c]\njwt_names = ['x']", "shares a name in jwt_names"),
    ],
    ids=lambda value: value[-30:],
)
def test_a_wrong_setting_for_tokens_is_named(lines: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_tenants(f"{lines}\n{FILE}")


def test_without_tenants_everybody_is_the_same_one() -> None:
    assert Tenants().authenticate(None) == Tenants().authenticate("Bearer x") == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tenants = 3",
        "[tenants]",
        "[tenants]\na = 1",
        "[tenants.a]",
        "[tenants.a]\nkey_sha256 = []",
        "[tenants.a]\nkey_sha256 = ['xyz']",
        f"[tenants.a]\nkey_sha256 = ['{digest('k')}']\nextra = 1",
        f"other = 1\n[tenants.a]\nkey_sha256 = ['{digest('k')}']",
        f"[tenants.'a b']\nkey_sha256 = ['{digest('k')}']",
        f"[tenants.a]\nkey_sha256 = ['{digest('k')}']\n[tenants.b]\nkey_sha256 = ['{digest('k')}']",
        "not toml",
    ],
)
def test_a_file_with_anything_odd_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_tenants(text)


def test_salts_differ_by_tenant_by_client_salt_and_by_cluster() -> None:
    salts = {
        salt_for(key, tenant=tenant, client_salt=salt)
        for key in (b"k1", b"k2")
        for tenant, salt in (("a", ""), ("b", ""), ("a", "x"), ("ax", ""))
    }
    assert len(salts) == 8
    assert all(len(salt) == 64 for salt in salts)
