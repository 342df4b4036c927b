"""Who may look at the console: holders of an operator's key."""

import hashlib
import hmac
import re
from dataclasses import dataclass

from backhaul_common.toml import parse_toml
from backhaul_router.core.tenants import refused

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_NO_KEY = hashlib.sha256(b"").hexdigest()
_MESSAGE = "missing or unknown operator key"


@dataclass(frozen=True, slots=True)
class Operators:
    """Hashes of the keys that are let in; without any, everybody is."""

    digests: tuple[bytes, ...] = ()

    def check(self, authorization: str | None) -> None:
        """Raises ApiError (401) unless an `Authorization` value brings one of the keys, compared in constant time."""
        if not self.digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        known = [hmac.compare_digest(digest, one) for one in self.digests]
        if scheme.lower() != "bearer" or not any(known):
            raise refused(_MESSAGE)


def parse_operators(text: str) -> Operators:
    """Parses a key file: the line that `backhaul-router-key` prints. Raises ValueError, never with a key in it."""
    document = parse_toml(text)
    digests = document.pop("key_sha256", None)
    if document or not isinstance(digests, list) or not digests:
        raise ValueError(
            'the file must hold key_sha256 = ["<hex>", ...], as backhaul-router-key prints it, and no more'
        )
    if not all(isinstance(one, str) and _SHA256_HEX.fullmatch(one) and one != _NO_KEY for one in digests):
        raise ValueError("every key_sha256 must be the 64 lower-case hex digits of a key's SHA-256")
    return Operators(tuple(map(bytes.fromhex, digests)))
