"""Keys, tenants and the salt between them."""

import hashlib

import pytest

from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import TenantLimits
from backhaul_router.core.salt import salt_for
from backhaul_router.core.tenants import Tenants, parse_tenants


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
