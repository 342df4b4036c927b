"""Certificates for trying TLS: a CA of one's own, and one certificate for each service. Not for production."""

import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ROLES = ("registry", "agent", "router", "gateway", "engine", "etcd", "client", "operator")
"""Whom `write_all` makes certificates for."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

_CA_LIFE = timedelta(days=3650)
_LIFE = timedelta(days=90)
_EARLIER = timedelta(hours=1)
"""Clocks differ."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A CA in a folder: ``ca.pem`` and ``ca.key``. It is made when it is not there."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError when what is there is no CA."""
        self._folder = folder
        self.path = folder / "ca.pem"
        """Its certificate."""
        key_path = folder / "ca.key"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self._key = _write_key(key_path)
            self._name = _name(f"Backhaul CA for trying it {secrets.token_hex(4)}")
            certificate = self._builder(self._name, self._key, _CA_LIFE).add_extension(
                x509.BasicConstraints(ca=True, path_length=0), critical=True
            )
            _write_certificate(self.path, certificate, self._key)
            return
        loaded = load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_path} was not made here")
        self._key = loaded
        self._name = x509.load_pem_x509_certificate(self.path.read_bytes()).subject

    def issue(self, role: str, *, hosts: Sequence[str] = LOOPBACK, life: timedelta = _LIFE) -> Pair:
        """Writes a certificate that has `name_of` the role as a name, and its key; replaces those that are there."""
        pair = Pair(self._folder / f"{role}.pem", self._folder / f"{role}.key")
        names: list[x509.GeneralName] = [x509.DNSName(name_of(role)), x509.UniformResourceIdentifier(uri_of(role))]
        key = _write_key(pair.key)
        certificate = (
            self._builder(_name(name_of(role)), key, life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([*names, *map(_host, hosts)]), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
        )
        _write_certificate(pair.cert, certificate, self._key)
        return pair

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, life: timedelta) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        issuer = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + min(life, timedelta()) - _EARLIER)
            .not_valid_after(now + life)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        )


def name_of(role: str) -> str:
    """Returns the name by which services know one another, wherever they run."""
    return f"{role}.backhaul"


def uri_of(role: str) -> str:
    """Returns the same as a URI, in the form of SPIFFE."""
    return f"spiffe://backhaul/{role}"


def write_all(folder: Path, hosts: Sequence[str]) -> None:
    """Writes certificates for all services, by the CA of the folder. Raises ValueError, OSError."""
    authority = Authority(folder)
    for role in ROLES:
        authority.issue(role, hosts=hosts)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    _replace(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
    return key


def _write_certificate(path: Path, builder: x509.CertificateBuilder, issuer: ec.EllipticCurvePrivateKey) -> None:
    _replace(path, builder.sign(issuer, hashes.SHA256()).public_bytes(Encoding.PEM), mode=0o644)


def _replace(path: Path, data: bytes, *, mode: int) -> None:
    """Puts a whole file in the place of another."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.touch(mode=mode)
    fresh.write_bytes(data)
    fresh.replace(path)
