"""Who calls a router: keys and tokens in `Authorization`, and the keys that tokens are checked with."""

import base64
from collections.abc import Callable
from random import Random

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.algorithms import OKPAlgorithm

from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import TenantLimits
from backhaul_router.core.tenants import Tenants
from backhaul_router.core.token_settings import TokenSettings
from backhaul_router.jwt_tokens import JwtTokens
from tests.fakes.issuer import AUDIENCE, ISSUER
from tests.fuzz.inputs import edited, json_of, made_of, one_of, samples_of
from tests.fuzz.target import Target

_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
_PUBLIC = {**OKPAlgorithm.to_jwk(_KEY.public_key(), as_dict=True), "kid": "one", "alg": "EdDSA", "use": "sig"}
_RSA = {"kty": "RSA", "kid": "two", "n": "u" * 343, "e": "AQAB", "key_ops": ["verify"]}
_EC = {"kty": "EC", "kid": "three", "crv": "P-256", "x": "A" * 43, "y": "A" * 43}
_KEY_SET = {"keys": [_PUBLIC, _RSA, _EC]}
_SETTINGS = TokenSettings(ISSUER, (AUDIENCE,), "keys.json")
_TENANTS = Tenants(
    limits={"t": TenantLimits()},
    jwt_names={"app": "t"},
    token_settings=_SETTINGS,
    tokens=JwtTokens(_SETTINGS, msgspec.json.encode(_KEY_SET)),
)
_LATE = 4_000_000_000

_HEADS = json_of({"alg": "EdDSA", "kid": "one", "typ": "JWT"}, {"alg": "none"}, {"alg": "HS256", "kid": "two"})
_CLAIMS = json_of(
    {"iss": ISSUER, "aud": AUDIENCE, "sub": "app", "exp": _LATE},
    {"iss": ISSUER, "aud": [AUDIENCE, "x"], "sub": "app", "exp": _LATE, "nbf": 1, "iat": 1.5, "jti": "1"},
    {"iss": ISSUER, "aud": AUDIENCE, "sub": "app", "exp": 1},
)


def _signed(chance: Random) -> bytes:
    """Returns a token whose signature holds, whatever the token says."""
    return _token(_HEADS(chance) if chance.randrange(2) else b'{"alg":"EdDSA","kid":"one"}', _CLAIMS(chance))


def _token(head: bytes, claims: bytes) -> bytes:
    said = b".".join(map(_base64, (head, claims)))
    return b".".join((said, _base64(_KEY.sign(said))))


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _caller(value: bytes) -> bool:
    try:
        # As aiohttp reads headers.
        return _TENANTS.authenticate(value.decode("utf-8", "surrogateescape")) == "t"
    except ApiError as error:
        if error.status != 401:
            raise
        return False


def _keys(data: bytes) -> bool:
    try:
        return JwtTokens(_SETTINGS, data).key_count > 0
    except ValueError:
        return False


_bearer: Callable[[bytes], bytes] = b"Bearer ".__add__

TARGETS = (
    Target(
        "callers",
        ("backhaul_router.core.tenants:Tenants.authenticate", "backhaul_router.jwt_tokens:JwtTokens.name_in"),
        one_of(made_of(_signed, _bearer), made_of(edited(_signed), _bearer), samples_of(b"Bearer key", b"Basic YTpi")),
        _caller,
    ),
    Target("keys of tokens", ("backhaul_router.jwt_tokens:_keys_in",), json_of(_KEY_SET, {"keys": [_PUBLIC]}), _keys),
)
