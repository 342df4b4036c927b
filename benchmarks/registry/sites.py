"""An etcd that holds so many pointers, with registries and the bare handlers in front of it, each a process."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backhaul_local.ports import HOST, Ports
from backhaul_local.probes import grpc_ready
from backhaul_local.processes import ProcessSpec, Supervisor
from benchmarks.registry.filled import Filled
from benchmarks.registry.pointers import CLUSTER

BARE = "bare"
REGISTRIES = {"1 registry": 1, "3 registries": 3}
ARMS = (BARE, *REGISTRIES)

_START_S = 120


@dataclass(frozen=True, slots=True)
class Server:
    """One process that answers."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Site:
    """What serves one number of pointers."""

    pointer_count: int
    arms: Mapping[str, Sequence[Server]]
    """The processes that share what callers of an arm ask."""


def open_site(filled: Filled, supervisor: Supervisor, ports: Ports) -> Site:
    """Starts what serves an etcd. Raises LocalError."""
    names = [f"registry-{filled.pointer_count}-{index}" for index in range(1, max(REGISTRIES.values()) + 1)]
    registries = [_registry(name, filled.endpoint, supervisor, ports) for name in names]
    bare = open_bare(f"bare-{filled.pointer_count}", filled.endpoint, supervisor, ports)
    arms = {arm: registries[:count] for arm, count in REGISTRIES.items()}
    return Site(filled.pointer_count, {BARE: [bare], **arms})


def open_bare(name: str, etcd: str, supervisor: Supervisor, ports: Ports) -> Server:
    """Starts the bare handlers; callers wait until they answer."""
    address = f"{HOST}:{ports.take()}"
    command = [sys.executable, "-m", "benchmarks.registry.bare", "--listen", address, "--etcd", etcd]
    return Server(address, supervisor.start(ProcessSpec(name=name, command=command)).pid)


def _registry(name: str, etcd: str, supervisor: Supervisor, ports: Ports) -> Server:
    address = f"{HOST}:{ports.take()}"
    command = [str(Path(sys.executable).with_name("backhaul-registry")), "--listen", address, "--cluster", CLUSTER]
    process = supervisor.start(ProcessSpec(name=name, command=[*command, "--etcd-endpoints", etcd]))
    supervisor.wait_until(name, partial(grpc_ready, address), _START_S)
    return Server(address, process.pid)
