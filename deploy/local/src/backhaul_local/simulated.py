"""How to start a simulated engine: a vLLM-compatible server with honest memory and no model."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backhaul_local.engines import MODEL_NAME, EnginePlace
from backhaul_local.ports import HOST
from backhaul_local.processes import ProcessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """What may differ from engine to engine; everything else by ``flags`` (`python -m backhaul_simulator --help`)."""

    connector: bool = True
    """Whether it runs Backhaul's connector; else vLLM's own NixlConnector."""
    ranks: int = 1
    """Data-parallel ranks of the server."""
    first_rank: int = 0
    """The first of them, where other servers have the ranks before."""
    ttl_s: float = 60
    """How long blocks of a finished turn are kept."""
    lease_s: float = 180
    """`kv_lease_duration`."""
    flags: Sequence[str] = ()
    """Added to the command line."""
    agent_flags: Sequence[str] = ()
    """Added to the command line of its agent."""
    agent_env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of its agent."""

    @property
    def row(self) -> int:
        """Ports that it needs in a row: rank n listens n ports above the one that it is given."""
        return self.first_rank + self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPorts:
    """Where rank 0 listens besides HTTP and side channel, rank n n ports higher; and what others are told.

    0: any port, or told as it is.
    """

    memory: int = 0
    told_memory: int = 0
    notifications: int = 0
    told_notifications: int = 0
    told_side_channel: int = 0


def simulated_spec(place: EnginePlace, options: SimulatedEngine, ports: SimulatedPorts) -> ProcessSpec:
    """Returns how to start one simulated engine."""
    flags = {
        "model": MODEL_NAME,
        "host": HOST,
        "port": str(place.http_port),
        "side-channel": f"{HOST}:{place.side_channel_port}",
        "ranks": str(options.ranks),
        "first-rank": str(options.first_rank),
        "ttl-s": str(options.ttl_s),
        "lease-s": str(options.lease_s),
        "advertised-side-channel-port": str(ports.told_side_channel),
        "notification-port": str(ports.notifications),
        "advertised-notification-port": str(ports.told_notifications),
        "transfer-port": str(ports.memory),
        "advertised-transfer-port": str(ports.told_memory),
    }
    command = [sys.executable, "-m", "backhaul_simulator"]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    command += ["--agent-socket", str(place.agent_socket)] if options.connector else ["--no-connector"]
    if place.kv_events_port is not None:
        command += ["--kv-events", f"tcp://*:{place.kv_events_port}"]
    return ProcessSpec(name=place.name, command=[*command, *options.flags])


def nixl_stand_in() -> Path:
    """Returns the folder that holds the ``nixl`` through which a simulated engine is told to renew and to release."""
    spec = importlib.util.find_spec("backhaul_simulator.stand_in")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "nixl"
