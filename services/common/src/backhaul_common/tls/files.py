"""Certificates, keys and CAs as PEM files hold them: read together, and only if they fit."""

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from backhaul_common.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files. Certificate and key go together."""

    cert: str = ""
    """The certificate that is shown, those of its issuers after it; empty: none is shown."""
    key: str = ""
    ca: str = ""
    """CAs of peers' certificates. Empty: those of the system for whoever calls, no certificates for whoever listens."""


@dataclass(frozen=True, slots=True)
class Material:
    """What the files held at one time."""

    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""
    """Nothing but certificates, in ASCII."""
    expires: datetime | None = None
    """When the certificate is over, or the last of the CAs if that is sooner; None without either."""


def read_material(files: TlsFiles, now: datetime) -> Material:
    """Reads the files. Raises InvalidArgumentError (TLS_FILES) that says what to do when they cannot be used."""
    cert, ends = _certificate(files, now) if files.cert else (b"", [])
    key = _key(files, cert) if files.cert else b""
    cas = _parsed(files.ca, _read(files.ca)) if files.ca else []
    if cas:
        ends.append(_ca_end(files.ca, cas, now))
    ca = b"".join(one.public_bytes(Encoding.PEM) for one in cas)
    material = Material(cert, key, ca, min(ends, default=None))
    try:
        show(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), material)
    except ssl.SSLError as error:
        raise _unusable(f"OpenSSL does not take {files.cert}: {error.reason}") from error
    return material


def show(context: ssl.SSLContext, material: Material) -> None:
    """Has whoever connects by the context show the certificate. Raises ssl.SSLError."""
    if not material.cert:
        return
    # OpenSSL reads from files alone; and those that were checked may be others by now.
    file = os.memfd_create("backhaul-tls")
    try:
        os.write(file, material.cert + b"\n" + material.key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


def _certificate(files: TlsFiles, now: datetime) -> tuple[bytes, list[datetime]]:
    pem = _read(files.cert)
    own = _parsed(files.cert, pem)[0]
    if own.not_valid_after_utc <= now:
        raise _unusable(f"the certificate in {files.cert} has expired on {_day(own)}: have a new one issued")
    if own.not_valid_before_utc > now:
        raise _unusable(f"the certificate in {files.cert} is not valid yet: is this machine's clock right?")
    return pem, [own.not_valid_after_utc]


def _key(files: TlsFiles, cert: bytes) -> bytes:
    pem = _read(files.key)
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _unusable(f"{files.key} holds no key that can be used: it must be PEM, without a passphrase") from error
    if key.public_key() != _public_key(files.cert, cert):
        raise _unusable(f"{files.key} is not the key of {files.cert}: give the two that were made together")
    return pem


def _public_key(path: str, cert: bytes) -> object:
    try:
        return _parsed(path, cert)[0].public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _unusable(f"the certificate in {path} has no key that can be used: have it issued for another") from error


def _ca_end(path: str, cas: Sequence[x509.Certificate], now: datetime) -> datetime:
    """Returns when the last of them is over: an old one may expire while the next is there."""
    last = max(certificate.not_valid_after_utc for certificate in cas)
    if last <= now:
        raise _unusable(f"every CA in {path} has expired: add the one that signs now")
    return last


def _parsed(path: str, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise _unusable(f"{path} holds no certificate in PEM form") from error


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unusable(f"{path} cannot be read: {error.strerror}") from error


def _day(certificate: x509.Certificate) -> str:
    return certificate.not_valid_after_utc.date().isoformat()


def _unusable(message: str) -> InvalidArgumentError:
    return InvalidArgumentError("TLS_FILES", message)
