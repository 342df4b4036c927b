"""Issues JSON Web Tokens as an identity provider does, and as somebody who only pretends to be one."""

import base64
import hashlib
import hmac
import json
import time
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://login.example"
AUDIENCE = "backhaul"


def private_key(algorithm: str, name: str) -> Any:
    """Returns the private key of a name; one of RSA is for all algorithms that it fits."""
    return _private_key("RSA" if algorithm[:2] in ("RS", "PS") else algorithm, name)


@cache
def _private_key(kind: str, name: str) -> Any:
    match kind:
        case "RSA":
            return rsa.generate_private_key(65537, 2048)
        case "EdDSA":
            return ed25519.Ed25519PrivateKey.generate()
        case _:
            curves: dict[str, ec.EllipticCurve] = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1()}
            return ec.generate_private_key(curves[kind])


def public_jwk(algorithm: str, name: str, **fields: Any) -> dict[str, Any]:
    """Returns a key as an issuer publishes it."""
    encode = jwt.get_algorithm_by_name(algorithm).to_jwk
    document: dict[str, Any] = encode(private_key(algorithm, name).public_key(), as_dict=True)
    return {**document, "kid": name, "alg": algorithm, "use": "sig", **fields}


def key_set(*keys: dict[str, Any]) -> bytes:
    """Returns what the keys file holds."""
    return json.dumps({"keys": keys or [public_jwk("ES256", "one")]}).encode()


def claims(subject: Any = "red-app", *, lives_s: float = 600, **changed: Any) -> dict[str, Any]:
    """Returns what a token says; None leaves a claim out."""
    usual = {"iss": ISSUER, "aud": AUDIENCE, "sub": subject, "exp": int(time.time() + lives_s)}
    return {name: value for name, value in {**usual, **changed}.items() if value is not None}


def token(
    said: dict[str, Any] | None = None,
    *,
    algorithm: str = "ES256",
    key: str = "one",
    kid: str | None = "one",
    **head: Any,
) -> str:
    """Returns a signed token."""
    named = {} if kid is None else {"kid": kid}
    return jwt.encode(said or claims(), private_key(algorithm, key), algorithm, headers={**named, **head})


def forged(algorithm: str, *, secret: bytes = b"", said: dict[str, Any] | None = None, **head: Any) -> str:
    """Returns a token signed with a shared secret, or not at all, whatever it says of its algorithm."""
    parts = ({"alg": algorithm, "kid": "one", "typ": "JWT", **head}, said or claims())
    signed = b".".join(_base64(json.dumps(part).encode()) for part in parts)
    signature = hmac.new(secret, signed, hashlib.sha256).digest() if secret else b""
    return (signed + b"." + _base64(signature)).decode()


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
