"""The registry's configuration."""

from typing import Literal

from pydantic import Field, SecretStr, model_validator

from backhaul_common.addresses import Address, Addresses, OptionalAddress
from backhaul_common.config import Texts
from backhaul_common.etcd import EtcdOptions
from backhaul_common.tls import TlsFiles, TlsSettings


class Config(TlsSettings, env_prefix="BACKHAUL_REGISTRY_"):
    """Everything that can be set."""

    listen: Address = "127.0.0.1:7100"
    """Address of the gRPC server, host:port."""
    listen_metrics: OptionalAddress = ""
    """host:port on which Prometheus reads /metrics (see docs/metrics.md), over TLS where the services use it; empty:
    nothing is counted."""
    etcd_endpoints: Addresses = ("127.0.0.1:2379",)
    """etcd's client addresses, host:port, comma-separated."""
    cluster: str = Field(default="default", pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    """Name under which everything is kept; registries of one cluster share it."""
    tls_agents: Texts = ()
    """Names, comma-separated, of which the certificate of whoever joins nodes or publishes must have one; empty: any
    that tls_ca issued."""
    etcd_ca: str = ""
    """PEM file with the CA of etcd's certificate; switches TLS on."""
    etcd_cert: str = ""
    """PEM file with this client's certificate."""
    etcd_key: str = ""
    """PEM file with this client's key."""
    etcd_user: str = ""
    """etcd user; empty without authentication."""
    etcd_password: SecretStr = SecretStr("")
    """Password of the etcd user."""
    pointer_ttl_s: float = Field(default=30.0, ge=2.0, le=600.0)
    """How long pointers outlive the broken stream of their agent, in seconds."""
    grace_s: float = Field(default=5.0, ge=0.0)
    """How long running calls may finish after SIGTERM, in seconds."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines to write."""

    @model_validator(mode="after")
    def _check_etcd(self) -> "Config":
        if bool(self.etcd_cert) != bool(self.etcd_key) or (self.etcd_cert and not self.etcd_ca):
            raise ValueError("etcd_cert and etcd_key go together, and need etcd_ca")
        if self.etcd_user and not self.etcd_password.get_secret_value():
            raise ValueError("etcd_user needs etcd_password")
        return self

    @property
    def needing_tls(self) -> tuple[str, ...]:
        """Settings that mean nothing without a certificate."""
        return (*super().needing_tls, "tls_agents")

    @property
    def etcd_files(self) -> TlsFiles | None:
        """What etcd is shown, and whom it must be certified by; None without TLS."""
        return TlsFiles(cert=self.etcd_cert, key=self.etcd_key, ca=self.etcd_ca) if self.etcd_ca else None

    @property
    def etcd(self) -> EtcdOptions:
        """How to reach etcd."""
        return EtcdOptions(
            endpoints=self.etcd_endpoints,
            user=self.etcd_user,
            password=self.etcd_password.get_secret_value(),
        )
