"""The settings by which every service is given its certificate."""

from pydantic import model_validator

from backhaul_common.config import ServiceConfig, Texts
from backhaul_common.tls.files import TlsFiles


class TlsSettings(ServiceConfig):
    """Part of a service's configuration. Without them connections are not encrypted."""

    tls_cert: str = ""
    """PEM file with the certificate that this service shows to whomever it calls or is called by, its issuers' after
    it; see docs/tls.md. Empty: no TLS"""
    tls_key: str = ""
    """PEM file with its key"""
    tls_ca: str = ""
    """PEM file with the CAs that issue the services' certificates; others are refused"""
    tls_callers: Texts = ()
    """names, comma-separated, of which the certificate of another service that calls this one must have one; empty: any
    that tls_ca issued"""

    @model_validator(mode="after")
    def _whole(self) -> "TlsSettings":
        given = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(given) and not all(given):
            raise ValueError("tls_cert, tls_key and tls_ca go together")
        if needing := [name for name in self.needing_tls if getattr(self, name) and not all(given)]:
            raise ValueError(f"{needing[0]} needs tls_cert, tls_key and tls_ca")
        return self

    @property
    def needing_tls(self) -> tuple[str, ...]:
        """Settings that mean nothing without a certificate."""
        return ("tls_callers",)

    @property
    def tls_files(self) -> TlsFiles | None:
        """The service's own; None without TLS."""
        return TlsFiles(cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca) if self.tls_cert else None


class EngineTlsSettings(TlsSettings):
    """The same for a service that calls engines and registries."""

    tls_registry_name: str = ""
    """name that the registries' certificates must have; empty: the host of their address"""
    engine_ca: str = ""
    """PEM file with the CAs of engines' certificates, for https engines; empty: tls_ca, and without it the system's"""

    @property
    def needing_tls(self) -> tuple[str, ...]:
        """Settings that mean nothing without a certificate."""
        return (*super().needing_tls, "tls_registry_name")

    @property
    def engine_files(self) -> TlsFiles | None:
        """What engines are shown, and whom they must be certified by; None: nothing, and by the system's CAs."""
        ca = self.engine_ca or self.tls_ca
        return TlsFiles(cert=self.tls_cert, key=self.tls_key, ca=ca) if ca else None
