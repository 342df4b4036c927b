"""Who calls: bearer keys, tokens, and the tenants they belong to."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from backhaul_common.toml import parse_toml
from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import TenantLimits
from backhaul_router.core.token_settings import Tokens, TokenSettings, token_settings

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SETTING = re.compile(r"[a-z0-9_]{1,24}")
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_NO_KEY = hashlib.sha256(b"").digest()
_LIMITS = {"max_turns": (1, 10**9), "max_queued": (0, 10**9), "priority": (-100, 100)}
"""Least and most of each."""
_IN_CLEAR = {"key", "keys", "api_key", "api_keys", "token", "tokens", "secret", "secrets", "password"}
_ONLY_HASHES = (
    "only hashes of keys belong here: backhaul-router-key makes a key and its hash, --stdin hashes one you have"
)


class Callers(Protocol):
    """Who may call, as things are now."""

    @property
    def configured(self) -> bool:
        """Whether callers must authenticate. Stays as it is while a router runs."""
        ...

    def authenticate(self, authorization: str | None) -> str:
        """Returns the tenant of an `Authorization` value; empty when no tenants are configured.

        Raises ApiError (401).
        """
        ...

    def check(self, tenant: str) -> None:
        """Raises ApiError (401) for a tenant that is known no more."""
        ...


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants; without any, everybody is the one anonymous tenant."""

    keys: tuple[tuple[bytes, str], ...] = ()
    """Pairs of a key's SHA-256 and its tenant's name."""
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    """What each tenant may have, by name; every tenant is in it."""
    jwt_names: Mapping[str, str] = field(default_factory=dict)
    """Tenants by what tokens call them."""
    token_settings: TokenSettings | None = None
    """Which tokens are taken; None: none are."""
    tokens: Tokens | None = None
    """Reads those; None: none are taken."""

    @property
    def configured(self) -> bool:
        """Whether callers must authenticate."""
        return bool(self.limits)

    def authenticate(self, authorization: str | None) -> str:
        """Returns the tenant of an `Authorization` value; empty when no tenants are configured.

        Raises ApiError (401) for a missing or unknown key, and for a token that is not valid. Every known key is
        compared, each in constant time.
        """
        if not self.configured:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        given = given.strip()
        if scheme.lower() != "bearer" or not given:
            raise refused()
        return self._of_key(given) or self._of_token(given)

    def check(self, tenant: str) -> None:
        """Raises ApiError (401) for a tenant that is not among these."""
        if self.configured and tenant not in self.limits:
            raise refused()

    def _of_key(self, key: str) -> str:
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = [tenant for known, tenant in self.keys if hmac.compare_digest(known, digest)]
        return found[0] if found else ""

    def _of_token(self, token: str) -> str:
        tenant = self.jwt_names.get(self.tokens.name_in(token)) if self.tokens else None
        if tenant is None:
            raise refused()
        return tenant


def refused(message: str = "missing or unknown API key") -> ApiError:
    """Returns the answer to a caller that is nobody here."""
    return ApiError(401, message, headers={"www-authenticate": "Bearer"})


def parse_tenants(text: str) -> Tenants:
    """Parses a tenants file; the reader of its tokens is still to be added.

    TOML tables ``[tenants.NAME]`` with ``key_sha256 = ["<hex>", ...]`` or ``jwt_names``, and maybe ``max_turns``,
    ``max_queued`` and ``priority``; beside them maybe ``[jwt]``. Raises ValueError naming what is wrong; never with a
    key in it.
    """
    document = parse_toml(text)
    tables, jwt = document.pop("tenants", None), document.pop("jwt", None)
    if document or not isinstance(tables, dict) or not tables:
        raise ValueError("the file must hold [tenants.NAME] tables, maybe [jwt], and nothing else")
    settings = None if jwt is None else token_settings(jwt)
    keys: dict[bytes, str] = {}
    names: dict[str, str] = {}
    limits: dict[str, TenantLimits] = {}
    for tenant, value in tables.items():
        table = _table(tenant, value)
        digests = _digests(tenant, table.pop("key_sha256", []))
        called = _jwt_names(tenant, table.pop("jwt_names", []), taken=settings is not None)
        if not digests and not called:
            raise ValueError(f"tenant {tenant!r} must have key_sha256 = [...] or jwt_names = [...]")
        _give(keys, tenant, digests, "a key")
        _give(names, tenant, called, "a name in jwt_names")
        limits[tenant] = TenantLimits(**{key: _limit(tenant, key, given) for key, given in table.items()})
    return Tenants(tuple(keys.items()), limits, names, settings)


def _give(owners: dict[Any, str], tenant: str, things: Iterable[object], what: str) -> None:
    """Raises ValueError for what another tenant has already."""
    for thing in things:
        if owners.setdefault(thing, tenant) != tenant:
            raise ValueError(f"tenant {tenant!r} shares {what} with {owners[thing]!r}")


def _table(tenant: str, value: object) -> dict[str, Any]:
    if not _NAME.fullmatch(tenant):
        raise ValueError("a tenant's name must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    if not isinstance(value, dict):
        raise ValueError(f"tenant {tenant!r} must be a table [tenants.{tenant}]")
    known = ("key_sha256", "jwt_names", *_LIMITS)
    for key in value:
        if key.lower() in _IN_CLEAR:
            raise ValueError(f"tenant {tenant!r}: {key!r} is unknown; {_ONLY_HASHES}")
        if key not in known:
            # What does not look like a setting may be a key.
            what = repr(key) if _SETTING.fullmatch(key) else "a setting"
            raise ValueError(f"tenant {tenant!r}: {what} is unknown; there are {', '.join(known)}")
    return dict(value)


def _digests(tenant: str, values: object) -> list[bytes]:
    if not isinstance(values, list):
        raise ValueError(f"tenant {tenant!r}: key_sha256 must be a list")
    if not all(isinstance(value, str) and _SHA256_HEX.fullmatch(value) for value in values):
        raise ValueError(f"tenant {tenant!r}: every key_sha256 must be 64 lower-case hex digits; {_ONLY_HASHES}")
    digests = [bytes.fromhex(value) for value in values]
    if _NO_KEY in digests:
        raise ValueError(f"tenant {tenant!r}: a key_sha256 is that of no key at all, as of a variable that was not set")
    return digests


def _jwt_names(tenant: str, values: object, *, taken: bool) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(f"tenant {tenant!r}: jwt_names must be a list of names that are not empty")
    if values and not taken:
        raise ValueError(f"tenant {tenant!r}: jwt_names need a table [jwt], which says whose tokens are taken")
    return values


def _limit(tenant: str, key: str, value: object) -> int:
    least, most = _LIMITS[key]
    # A boolean is an int, too.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"tenant {tenant!r}: {key} must be a whole number from {least} to {most}")
    return value
