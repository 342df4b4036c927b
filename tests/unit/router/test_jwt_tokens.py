"""Tokens: whom a valid one names, and what is no valid one."""

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import RSAAlgorithm

from backhaul_router.core.errors import ApiError
from backhaul_router.core.token_settings import TokenSettings
from backhaul_router.jwt_tokens import ALGORITHMS, JwtTokens
from tests.fakes.issuer import AUDIENCE, ISSUER, claims, forged, key_set, private_key, public_jwk, token


def reader(*keys: dict[str, Any], **settings: Any) -> JwtTokens:
    return JwtTokens(TokenSettings(ISSUER, (AUDIENCE,), "keys.json", **settings), key_set(*keys))


READER = reader()
WHOLE = token(claims(lives_s=1_000_000))


# Signatures


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "RS512", "ES256", "ES384", "EdDSA"])
def test_a_token_names_its_tenant(algorithm: str) -> None:
    assert reader(public_jwk(algorithm, "one")).name_in(token(algorithm=algorithm)) == "red-app"


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", ""])
def test_a_token_that_nobody_signed_is_refused(algorithm: str) -> None:
    assert reader().name_in(forged(algorithm)) == ""


def test_a_public_key_is_never_taken_for_a_shared_secret() -> None:
    public = private_key("RS256", "one").public_key()
    known = reader(public_jwk("RS256", "one"))
    secrets = [
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        json.dumps(public_jwk("RS256", "one")).encode(),
        public_jwk("RS256", "one")["n"].encode(),
    ]
    for secret in secrets:
        for algorithm in ("HS256", "RS256"):
            assert known.name_in(forged(algorithm, secret=secret)) == ""
    assert not [algorithm for algorithm in ALGORITHMS if algorithm.startswith("HS")]


def test_a_key_is_for_one_algorithm_whatever_the_token_says() -> None:
    known = reader(public_jwk("RS256", "one"))
    assert known.name_in(token(algorithm="RS256")) == "red-app"
    for algorithm in ("RS512", "PS256"):
        assert known.name_in(token(algorithm=algorithm)) == ""


def test_a_signature_counts_only_with_the_key_that_the_token_names() -> None:
    known = reader(public_jwk("ES256", "one"), public_jwk("ES256", "two"))
    assert known.name_in(token(key="two", kid="two")) == "red-app"
    assert known.name_in(token(key="two", kid="one")) == ""
    assert known.name_in(token(kid="three")) == ""


def test_a_token_that_names_no_key_is_read_with_the_only_one_there_is() -> None:
    assert reader().name_in(token(kid=None)) == "red-app"
    assert reader(public_jwk("ES256", "one"), public_jwk("ES256", "two")).name_in(token(kid=None)) == ""


def test_a_key_that_comes_with_the_token_is_not_used() -> None:
    theirs = public_jwk("ES256", "another")
    assert reader().name_in(token(key="another", jwk=theirs)) == ""
    assert reader().name_in(token(key="another", jku="https://elsewhere.example/keys")) == ""


def test_extensions_that_must_be_understood_and_are_not_refuse_a_token() -> None:
    assert reader().name_in(token(crit=["new"], new=1)) == ""


def test_a_changed_token_is_refused() -> None:
    head, body, signature = token().split(".")
    other = token(claims("blue-app")).split(".")[1]
    assert reader().name_in(f"{head}.{other}.{signature}") == ""
    assert reader().name_in(f"{head}.{body}.") == ""


# What a token says


@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://elsewhere.example"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        {"aud": []},
        {"exp": None},
        {"exp": "soon"},
        {"subject": None},
        {"subject": 7},
        {"subject": ["red-app"]},
        {"subject": ""},
        {"nbf": 2**40},
        {"iat": 2**40},
    ],
    ids=json.dumps,
)
def test_a_token_for_others_or_without_what_is_needed_is_refused(changed: dict[str, Any]) -> None:
    assert reader().name_in(token(claims(**changed))) == ""


def test_a_token_may_be_for_others_too() -> None:
    assert reader().name_in(token(claims(aud=["another", AUDIENCE]))) == "red-app"


def test_any_claim_can_name_the_tenant() -> None:
    assert reader(tenant_claim="client").name_in(token(claims(client="red"))) == "red"
    assert reader(tenant_claim="client").name_in(token()) == ""


def test_clocks_may_differ_by_the_leeway_and_no_more() -> None:
    ago, ahead = claims(lives_s=-200), claims(nbf=claims(lives_s=200)["exp"])
    assert [reader(leeway_s=300).name_in(token(said)) for said in (ago, ahead)] == ["red-app", "red-app"]
    assert reader(leeway_s=100).name_in(token(ahead)) == ""
    with pytest.raises(ApiError, match="expired") as caught:
        reader(leeway_s=100).name_in(token(ago))
    assert caught.value.status == 401


def test_only_who_has_had_a_valid_token_is_told_that_it_has_expired() -> None:
    assert reader().name_in(token(claims(lives_s=-200), key="another")) == ""


# What is no token


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")))
def test_any_other_text_names_nobody(text: str) -> None:
    assert READER.name_in(text) == ""


@given(st.lists(st.sampled_from([*WHOLE.split("."), "e30", "bnVsbA", "", "W10"]) | st.text(), min_size=2, max_size=4))
def test_pieces_of_tokens_name_nobody(parts: list[str]) -> None:
    text = ".".join(parts)
    assert READER.name_in(text) == ("red-app" if text == WHOLE else "")


def test_a_token_of_any_depth_or_length_names_nobody() -> None:
    for head in ({"kid": "one", "x": [[]]}, {"kid": 7}, {"alg": ["ES256"]}, {"kid": None}):
        assert READER.name_in(forged("ES256", secret=b"s", **head)) == ""
    deep = "W" + "1tb" * 2_000
    assert READER.name_in(f"{deep}.{deep}.{deep}") == ""
    assert READER.name_in(token(claims(more="x" * 10_000))) == ""


# The keys file


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "no JSON Web Key Set"),
        (b"\xff", "no JSON Web Key Set"),
        (b"[]", "no JSON Web Key Set"),
        (b"{}", "no JSON Web Key Set"),
        (b'{"keys": {}}', "no JSON Web Key Set"),
        (b'{"keys": [1]}', "no JSON Web Key Set"),
        (b'{"keys": []}', "no key for signatures"),
        (b'{"keys": ' + b"[" * 100_000, "no JSON Web Key Set"),
        (key_set({"kty": "oct", "k": "c2VjcmV0"}), "secret or private key"),
        (key_set(public_jwk("ES256", "one", d="c2VjcmV0")), "secret or private key"),
        (key_set(public_jwk("ES256", "one"), public_jwk("ES256", "two", kid="one")), "the same kid"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_keys_file_with_anything_odd_is_refused_and_nothing_of_it_repeated(text: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        JwtTokens(TokenSettings(ISSUER, (AUDIENCE,), "keys.json"), text)
    assert "c2VjcmV0" not in str(caught.value)


def test_keys_of_other_kinds_are_left_out() -> None:
    short = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key(), as_dict=True)
    others: list[dict[str, Any]] = [
        public_jwk("ES256", "two", use="enc"),
        public_jwk("ES256", "two", key_ops=["encrypt"]),
        public_jwk("ES256", "two", kty="new"),
        public_jwk("ES256", "two", alg="ECDH-ES"),
        public_jwk("ES256", "two", alg=["ES256"]),
        public_jwk("ES256", "two", alg=None, crv={}),
        public_jwk("ES256", "two", x="!"),
        public_jwk("ES256", "two", kid=2),
        {**short, "kid": "two", "alg": "RS256"},
        {},
    ]
    known = reader(*others, public_jwk("ES256", "one"))
    assert known.key_count == 1
    assert known.name_in(token()) == "red-app"
    with pytest.raises(ValueError, match="no key for signatures"):
        reader(*others)


def test_a_key_without_an_algorithm_has_that_of_its_kind() -> None:
    for algorithm in ("RS256", "ES384", "EdDSA"):
        bare = {name: value for name, value in public_jwk(algorithm, "one").items() if name != "alg"}
        assert reader(bare).name_in(token(algorithm=algorithm)) == "red-app"
