"""Reads JSON Web Tokens (RFC 7519) with the public keys of whoever issues them."""

from typing import Any

import jwt
import msgspec
import structlog

from backhaul_router.core.tenants import refused
from backhaul_router.core.token_settings import TokenSettings

_log = structlog.get_logger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures that only the issuer can make. None by a shared secret: whoever can check one can make one."""

_LONGEST = 8_190
"""Characters of a token; HTTP headers are no longer, either."""


class JwtTokens:
    """The tokens of one issuer."""

    def __init__(self, settings: TokenSettings, key_set: bytes) -> None:
        """``key_set`` is a JSON Web Key Set (RFC 7517). Raises ValueError naming what is wrong with it."""
        self._settings = settings
        self._keys = _keys_in(key_set)
        self._required = list(dict.fromkeys(("exp", "iss", "aud", settings.tenant_claim)))

    @property
    def key_count(self) -> int:
        """Keys that tokens may be signed with."""
        return len(self._keys)

    def name_in(self, token: str) -> str:
        """Returns whom a token names; empty when it is not valid here. Raises ApiError (401) for one that was."""
        if len(token) > _LONGEST or not token.isascii():
            return ""
        try:
            name = self._claims(token)[self._settings.tenant_claim]
        except jwt.ExpiredSignatureError:
            raise refused("the token has expired") from None
        except jwt.PyJWTError as error:
            _log.debug("token refused", reason=type(error).__name__)
            return ""
        return name if isinstance(name, str) else ""

    def _claims(self, token: str) -> dict[str, Any]:
        """Returns what a valid token says. A key fits one algorithm, whatever the token names."""
        return jwt.decode(
            token,
            self._key_of(jwt.get_unverified_header(token).get("kid")),
            algorithms=ALGORITHMS,
            audience=self._settings.audience,
            issuer=self._settings.issuer,
            leeway=self._settings.leeway_s,
            options={"require": self._required},
        )

    def _key_of(self, kid: str | None) -> jwt.PyJWK:
        """Returns the key of a name; a token that names none was signed with the only one there is."""
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if kid is None or kid not in self._keys:
            raise jwt.InvalidKeyError("no such key")
        return self._keys[kid]


def _keys_in(key_set: bytes) -> dict[str | None, jwt.PyJWK]:
    """Returns the keys that can be used, by name. Those of other kinds are left out (RFC 7517, 5)."""
    try:
        entries = msgspec.json.decode(key_set, type=dict[str, Any]).get("keys")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON Web Key Set: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError('it is no JSON Web Key Set: that is {"keys": [...]}')
    keys: dict[str | None, jwt.PyJWK] = {}
    for entry in entries:
        if entry.get("kty") == "oct" or "d" in entry or "k" in entry:
            raise ValueError(
                "it holds a secret or private key, which belongs to its issuer alone: only public ones here"
            )
        key = _key_in(entry)
        if key is None:
            continue
        if key.key_id in keys:
            raise ValueError("two of its keys have the same kid")
        keys[key.key_id] = key
    if not keys:
        raise ValueError(f"it holds no key for signatures of the kinds {', '.join(ALGORITHMS)}")
    return keys


def _key_in(entry: dict[str, Any]) -> jwt.PyJWK | None:
    """Returns a key for signatures; None for anything else, and for one that is too short."""
    uses = entry.get("key_ops", ["verify"])
    if entry.get("use", "sig") != "sig" or not isinstance(uses, list) or "verify" not in uses:
        return None
    try:
        key = jwt.PyJWK(entry)
    except (jwt.PyJWTError, TypeError):
        # TypeError: of an `alg` that is no text (PyJWT 2.15, api_jwk.py).
        return None
    strong = key.algorithm_name in ALGORITHMS and not key.Algorithm.check_key_length(key.key)
    return key if strong and isinstance(key.key_id, str | None) else None
