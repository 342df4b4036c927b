"""Who calls: bearer keys and the tenants they belong to."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backhaul_common.toml import parse_toml
from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import TenantLimits

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_LIMITS = {"max_turns": (1, 10**9), "max_queued": (0, 10**9), "priority": (-100, 100)}
"""Least and most of each."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants; without any, everybody is the one anonymous tenant."""

    keys: tuple[tuple[bytes, str], ...] = ()
    """Pairs of a key's SHA-256 and its tenant's name."""
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    """What each tenant may have, by name."""

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

    Each may have ``max_turns``, ``max_queued`` and ``priority``, too. Raises ValueError naming what is wrong; never
    with a key in it.
    """
    document = parse_toml(text)
    if set(document) != {"tenants"} or not isinstance(document["tenants"], dict) or not document["tenants"]:
        raise ValueError("the file must hold [tenants.NAME] tables and nothing else")
    keys: dict[bytes, str] = {}
    limits: dict[str, TenantLimits] = {}
    for name, value in document["tenants"].items():
        table = _table(name, value)
        for digest in _digests(name, table.pop("key_sha256", None)):
            if keys.setdefault(digest, name) != name:
                raise ValueError(f"tenant {name!r} shares a key with {keys[digest]!r}")
        limits[name] = TenantLimits(**{key: _limit(name, key, given) for key, given in table.items()})
    return Tenants(tuple(keys.items()), limits)


def _table(name: str, value: object) -> dict[str, Any]:
    if not _NAME.fullmatch(name):
        raise ValueError(f"tenant name {name!r} must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    if not isinstance(value, dict):
        raise ValueError(f"tenant {name!r} must be a table [tenants.{name}]")
    known = ("key_sha256", *_LIMITS)
    for key in value:
        if key not in known:
            raise ValueError(f"tenant {name!r}: {key!r} is unknown; there are {', '.join(known)}")
    return dict(value)


def _digests(name: str, values: object) -> list[bytes]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"tenant {name!r} must have key_sha256 = [...]")
    if not all(isinstance(value, str) and _SHA256_HEX.fullmatch(value) for value in values):
        raise ValueError(f"tenant {name!r}: every key_sha256 must be 64 lower-case hex digits")
    return [bytes.fromhex(value) for value in values]


def _limit(name: str, key: str, value: object) -> int:
    least, most = _LIMITS[key]
    # A boolean is an int, too.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"tenant {name!r}: {key} must be a whole number from {least} to {most}")
    return value
