"""What a stack consists of."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from backhaul_local.engines import EngineOptions
from backhaul_local.simulated import SimulatedEngine

Engine = EngineOptions | SimulatedEngine


class Network(Protocol):
    """What lies between two parts of a stack."""

    def between(self, source: str, target: str, address: str) -> str:
        """Returns the address under which ``source`` reaches ``target``, which listens on ``address``.

        An address is host:port, or the absolute path of a Unix socket. Both names are those of processes, the target's
        with what it is that listens there: ``decode-1 side channel``. The source is ``routers`` for what nodes tell all
        routers, ``engines`` for the memory of a simulated engine, ``peers`` for what an engine tells whoever shakes
        hands with it (other engines and its own agent), ``members`` for what etcd's members tell one another.
        """
        ...


class DirectNetwork:
    """Nothing in between."""

    def between(self, source: str, target: str, address: str) -> str:
        """Returns the address itself."""
        return address


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What the stack consists of."""

    engine_python: Path = Path(sys.executable)
    """Python of the environment that holds vLLM and the connector; not needed for simulated engines."""
    model: Path = Path()
    """Folder of the model; not needed for simulated engines."""
    state: Path
    """Folder for data and logs."""
    prefill: Sequence[Engine] = (EngineOptions(),)
    decode: Sequence[Engine] = (EngineOptions(),)
    etcd_members: int = 1
    etcd_flags: Sequence[str] = ()
    registries: int = 1
    routers: int = 1
    registry_flags: Sequence[str] = ()
    agent_flags: Sequence[str] = ()
    router_flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the services (not of the engines)."""
    default_ports: bool = False
    """Takes the ports that the README names where they are free, else random ones."""
    tls: bool = False
    """Whether everybody shows a certificate and asks for one, on every hop."""
    console: bool = False
    """Whether each router serves a console, for this machine alone."""
    gateway: bool = False
    """Whether Envoy is in front of the routers."""
    metrics: bool = False
    """Whether the services show what they count."""
    network: Network = field(default_factory=DirectNetwork)
    """Between any two parts; the memory, side channels and notifications of real engines are reached directly."""
