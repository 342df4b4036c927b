"""Certificates of throwaway CAs, and what is shown and trusted by them."""

from datetime import timedelta
from pathlib import Path

from backhaul_common.clock import time_of_day
from backhaul_common.tls import Identity, TlsFiles
from backhaul_local.certificates import Authority, Pair

OVER = timedelta(minutes=-1)
"""Life of a certificate that has expired."""


def identity(pair: Pair | None, *authorities: Authority) -> Identity:
    """Shows a certificate, be it expired, and trusts one CA; none: those of the system, or nobody."""
    ca = str(authorities[0].path) if authorities else ""
    files = TlsFiles(cert=str(pair.cert), key=str(pair.key), ca=ca) if pair else TlsFiles(ca=ca)
    # The hour before now, in which whatever was issued is valid.
    return Identity("test", files, now=lambda: time_of_day() - timedelta(minutes=30))


def settings(pair: Pair, authority: Authority) -> dict[str, str]:
    """Returns a service's settings."""
    return {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_ca": str(authority.path)}


def take(new: Pair, place: Pair) -> None:
    """Puts a certificate and its key in the place of others."""
    new.key.replace(place.key)
    new.cert.replace(place.cert)


def both(path: Path, *authorities: Authority) -> Path:
    """Writes a file with several CAs."""
    path.write_bytes(b"".join(authority.path.read_bytes() for authority in authorities))
    return path
