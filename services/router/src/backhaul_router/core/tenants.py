"""Who calls: bearer keys and the tenants they belong to."""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backhaul_router.core.errors import ApiError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants; without any, everybody is the one anonymous tenant."""

    keys: tuple[tuple[bytes, str], ...] = ()
    """Pairs of a key's SHA-256 and its tenant's name."""

    @property
    def configured(self) -> bool:
        """Whether callers must authenticate."""
        return bool(self.keys)

    def authenticate(self, authorization: str | None) -> str:
        """Returns the tenant of an `Authorization` value; empty when no tenants are configured.

        Raises ApiError (401) for a missing or unknown key. Every known key is compared, each in constant time.
        """
        if not self.configured:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [tenant for known, tenant in self.keys if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not found:
            raise ApiError(401, "missing or unknown API key", headers={"www-authenticate": "Bearer"})
        return found[0]


def parse_tenants(text: str) -> Tenants:
    """Parses a tenants file: TOML tables ``[tenants.NAME]`` with ``key_sha256 = ["<hex>", ...]``.

    Raises ValueError naming what is wrong; never with a key in it.
    """
    document = tomllib.loads(text)
    if set(document) != {"tenants"} or not isinstance(document["tenants"], dict) or not document["tenants"]:
        raise ValueError("the file must hold [tenants.NAME] tables and nothing else")
    keys: dict[bytes, str] = {}
    for name, table in document["tenants"].items():
        for digest in _digests(name, table):
            if keys.setdefault(digest, name) != name:
                raise ValueError(f"tenant {name!r} shares a key with {keys[digest]!r}")
    return Tenants(tuple(keys.items()))


def _digests(name: str, table: Mapping[str, Any]) -> list[bytes]:
    if not _NAME.fullmatch(name):
        raise ValueError(f"tenant name {name!r} must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    values = table.get("key_sha256") if isinstance(table, dict) and set(table) == {"key_sha256"} else None
    if not isinstance(values, list) or not values:
        raise ValueError(f"tenant {name!r} must have key_sha256 = [...] and nothing else")
    if not all(isinstance(value, str) and _SHA256_HEX.fullmatch(value) for value in values):
        raise ValueError(f"tenant {name!r}: every key_sha256 must be 64 lower-case hex digits")
    return [bytes.fromhex(value) for value in values]
