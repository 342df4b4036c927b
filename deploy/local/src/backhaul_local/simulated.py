"""How to start a simulated engine: a vLLM-compatible server with honest memory and no model."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
    ttl_s: float = 60
    """How long blocks of a finished turn are kept."""
    lease_s: float = 180
    """`kv_lease_duration`."""
    flags: Sequence[str] = ()
    """Added to the command line."""


def simulated_spec(
    place: EnginePlace, options: SimulatedEngine, *, memory_port: int, told_memory_port: int
) -> ProcessSpec:
    """Returns how to start one simulated engine.

    Rank 0's memory is read at ``memory_port``, and readers are told ``told_memory_port``; rank n's n ports higher.
    """
    flags = {
        "model": MODEL_NAME,
        "host": HOST,
        "port": str(place.http_port),
        "side-channel": f"{HOST}:{place.side_channel_port}",
        "ranks": str(options.ranks),
        "ttl-s": str(options.ttl_s),
        "lease-s": str(options.lease_s),
        "transfer-port": str(memory_port),
        "advertised-transfer-port": str(told_memory_port),
    }
    command = [sys.executable, "-m", "backhaul_simulator"]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    command += ["--agent-socket", str(place.agent_socket)] if options.connector else ["--no-connector"]
    return ProcessSpec(name=place.name, command=[*command, *options.flags])


def nixl_stand_in() -> Path:
    """Returns the folder that holds the ``nixl`` through which a simulated engine is told to renew and to release."""
    spec = importlib.util.find_spec("backhaul_simulator.stand_in")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "nixl"
