"""What is said of files that cannot be used."""

import base64
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from backhaul_common.errors import InvalidArgumentError
from backhaul_common.tls import TlsFiles
from backhaul_common.tls.files import read_material
from backhaul_local.certificates import Authority, Pair
from tests.fakes.certificates import OVER

_ELLIPTIC = bytes.fromhex("2a8648ce3d0201")
"""The kind of an elliptic curve's key: 1.2.840.10045.2.1 (RFC 5480, 2.1.1)."""
_VERSION_3 = bytes.fromhex("a003020102")
"""A certificate's version: v3 is written 2 (RFC 5280, 4.1)."""


def now() -> datetime:
    return datetime.now(UTC)


def files(pair: Pair, authority: Authority) -> TlsFiles:
    return TlsFiles(cert=str(pair.cert), key=str(pair.key), ca=str(authority.path))


def test_what_fits_is_read_whole(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("router", life=timedelta(days=3))
    material = read_material(files(pair, authority), now())
    assert (material.cert, material.key) == (pair.cert.read_bytes(), pair.key.read_bytes())
    assert material.ca == authority.path.read_bytes()
    assert material.expires is not None
    assert timedelta(days=2) < material.expires - now() < timedelta(days=4)
    assert "PRIVATE" not in repr(material)


def test_a_ca_that_ends_sooner_ends_it_all(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    ending = Authority(tmp_path / "other").issue("ending", life=timedelta(days=1))
    pair = authority.issue("router")
    material = read_material(TlsFiles(cert=str(pair.cert), key=str(pair.key), ca=str(ending.cert)), now())
    assert material.expires is not None
    assert material.expires - now() < timedelta(days=2)


def test_of_several_cas_the_last_counts(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    over = Authority(tmp_path / "other").issue("over", life=OVER)
    pair = authority.issue("router", life=timedelta(days=3))
    several = tmp_path / "several.pem"
    several.write_bytes(over.cert.read_bytes() + authority.path.read_bytes())
    material = read_material(TlsFiles(cert=str(pair.cert), key=str(pair.key), ca=str(several)), now())
    assert material.expires is not None
    assert material.expires - now() > timedelta(days=2)


def test_what_stands_between_certificates_is_no_matter(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("router")
    before = authority.path.read_bytes()
    authority.path.write_bytes("Főtanúsítvány\n".encode() + before)
    assert read_material(files(pair, authority), now()).ca == before


Spoil = Callable[[Authority, Pair], TlsFiles]


def missing(authority: Authority, pair: Pair) -> TlsFiles:
    pair.key.unlink()
    return files(pair, authority)


def no_certificate(authority: Authority, pair: Pair) -> TlsFiles:
    pair.cert.write_text("hello")
    return files(pair, authority)


def cut(authority: Authority, pair: Pair) -> TlsFiles:
    pair.cert.write_bytes(pair.cert.read_bytes()[:200])
    return files(pair, authority)


def no_key(authority: Authority, pair: Pair) -> TlsFiles:
    return TlsFiles(cert=str(pair.cert), key=str(pair.cert), ca=str(authority.path))


def other_key(authority: Authority, pair: Pair) -> TlsFiles:
    return TlsFiles(cert=str(pair.cert), key=str(authority.issue("other").key), ca=str(authority.path))


def new_key(authority: Authority, pair: Pair) -> TlsFiles:
    """Shows a certificate for a key of a kind that nobody knows."""
    replace(pair, _ELLIPTIC, _ELLIPTIC[:-1] + b"\x7f")
    return files(pair, authority)


def new_version(authority: Authority, pair: Pair) -> TlsFiles:
    """Shows a certificate of a version that is still to come."""
    replace(pair, _VERSION_3, _VERSION_3[:-1] + b"\x08")
    return files(pair, authority)


def replace(pair: Pair, part: bytes, other: bytes) -> None:
    der = x509.load_pem_x509_certificate(pair.cert.read_bytes()).public_bytes(Encoding.DER)
    assert der.count(part) == 1
    spoilt = base64.encodebytes(der.replace(part, other))
    pair.cert.write_bytes(b"-----BEGIN CERTIFICATE-----\n%s-----END CERTIFICATE-----\n" % spoilt)


def weak_key(authority: Authority, pair: Pair) -> TlsFiles:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "weak")])
    begin, end = now() - timedelta(hours=1), now() + timedelta(hours=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, begin, end)
    pair.cert.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files(pair, authority)


def expired(authority: Authority, pair: Pair) -> TlsFiles:
    return files(authority.issue("router", life=OVER), authority)


def expired_ca(authority: Authority, pair: Pair) -> TlsFiles:
    return TlsFiles(cert=str(pair.cert), key=str(pair.key), ca=str(authority.issue("old", life=OVER).cert))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (missing, r"router\.key cannot be read: No such file or directory"),
        (no_certificate, r"router\.pem holds no certificate in PEM form"),
        (cut, r"router\.pem holds no certificate in PEM form"),
        (new_version, r"router\.pem holds no certificate in PEM form"),
        (no_key, r"router\.pem holds no key that can be used: it must be PEM, without a passphrase"),
        (other_key, r"other\.key is not the key of .*router\.pem: give the two that were made together"),
        (new_key, r"the certificate in .*router\.pem has no key that can be used: have it issued for another"),
        (weak_key, r"OpenSSL does not take .*router\.pem: EE_KEY_TOO_SMALL"),
        (expired, r"router\.pem has expired on \d{4}-\d\d-\d\d: have a new one issued"),
        (expired_ca, r"every CA in .*old\.pem has expired: add the one that signs now"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_to_do(tmp_path: Path, spoil: Spoil, told: str) -> None:
    authority = Authority(tmp_path)
    spoilt = spoil(authority, authority.issue("router"))
    with pytest.raises(InvalidArgumentError, match=told):
        read_material(spoilt, now())


def test_a_certificate_of_tomorrow_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with pytest.raises(InvalidArgumentError, match="not valid yet: is this machine's clock right"):
        read_material(files(authority.issue("router"), authority), now() - timedelta(days=1))
