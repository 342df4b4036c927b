"""Fixtures of engine pairs, simulated and real. Without the engine environment tests of real ones fail and say so."""

import importlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import backhaul_local
from backhaul_local.engines import EngineOptions, EnginePlace, engine_spec
from backhaul_local.ports import HOST, Ports
from backhaul_local.probes import http_ready
from backhaul_local.processes import ProcessSpec, Supervisor
from backhaul_local.simulated import SimulatedEngine, SimulatedPorts, simulated_spec
from tests.fakes.agent_peer import AgentPeer
from tests.fakes.engine_pair import Engine, Pair

ROOT = Path(__file__).parents[1]

REAL = pytest.param("real", marks=pytest.mark.engine)

BLOCKS = 110
"""Of 32 tokens each: room for one long request, too little for two."""
MAX_MODEL_LEN = 3200
TTL_S, REAL_TTL_S = 10.0, 20.0
"""For the sake of tests that wait for its end; no shorter, for vLLM reads no handle in its last 5 s."""
LEASE_S = 15.0
"""The shortest with which the connector reuses anything."""
STOCK_LEASE_S = 6.0


@dataclass(frozen=True, slots=True)
class Engines:
    """A prefill and a decode engine."""

    prefill: Engine
    decode: Engine
    vocabulary: Sequence[int]
    """Token ids of ordinary words."""


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Python of the environment that holds vLLM."""
    python = Path(os.environ.get("BACKHAUL_ENGINE_PYTHON", ROOT / ".venv-engine" / "bin" / "python"))
    if not python.exists():
        pytest.fail(f"no engine environment at {python}: run `make install`, or set BACKHAUL_ENGINE_PYTHON")
    return python


@pytest.fixture(scope="session")
def tiny_model(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model of about two million random parameters."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    script = Path(backhaul_local.__file__).with_name("model.py")
    subprocess.run([engine_python, script, folder, "--size", "tiny"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def real_engines(engine_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Real engines with Backhaul's connector."""
    with running_real(tmp_path_factory.mktemp("c"), engine_python, tiny_model) as engines:
        yield engines


@pytest.fixture(scope="session")
def simulated_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Simulated engines with Backhaul's connector."""
    with running_simulated(tmp_path_factory.mktemp("s")) as engines:
        yield engines


@pytest.fixture(scope="session", params=["simulated", REAL])
def engines(request: pytest.FixtureRequest) -> Engines:
    """Engines with Backhaul's connector, of either kind: what holds for the one must hold for the other."""
    found: Engines = request.getfixturevalue(f"{request.param}_engines")
    return found


@pytest.fixture
def pair(engines: Engines, request: pytest.FixtureRequest) -> Pair:
    """These engines, with nothing cached or pinned by an earlier test."""
    for set_id in engines.decode.retained():
        engines.decode.nixl.release(set_id)
    for hand_off in engines.prefill.take_hand_offs():
        engines.prefill.nixl.release(hand_off)
    forget(engines)
    return Pair(engines.prefill, engines.decode, engines.vocabulary, seed=request.node.name)


def forget(engines: Engines) -> None:
    """Empties both prefix caches. Hand-offs that nobody read leave with their lease."""
    deadline = time.monotonic() + engines.prefill.lease_s + 4
    while not all([engines.prefill.forget(), engines.decode.forget()]):
        assert time.monotonic() < deadline, "blocks of an earlier test stay pinned"
        time.sleep(0.05)


@contextmanager
def running_real(
    folder: Path, python: Path, model: Path, *, agents: bool = True, ttl_s: float = REAL_TTL_S
) -> Iterator[Engines]:
    """Runs vLLM. Without ``agents`` the connector behaves like vLLM's own, for want of one."""
    options = EngineOptions(
        ttl_s=ttl_s,
        lease_s=_lease_s(agents),
        num_blocks=BLOCKS,
        flags=("--max-model-len", str(MAX_MODEL_LEN)),
        env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"},
        extra_config={"kv_recompute_threshold": 1, "backhaul_min_verified": 64},
    )
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"].values()
    kind = _Kind(
        place=partial(EnginePlace, python=python, model=model),
        spec=partial(engine_spec, options=options),
        nixl=importlib.import_module("nixl._api"),
        vocabulary=[token for token in vocabulary if token > 300],
        ttl_s=ttl_s,
        lease_s=_lease_s(agents),
        timeout_s=120,
    )
    with _running(folder, kind, agents=agents) as engines:
        yield engines


@contextmanager
def running_simulated(folder: Path, *, agents: bool = True) -> Iterator[Engines]:
    """Runs simulated engines. Without ``agents`` they have vLLM's own connector."""
    flags = {
        "block-count": BLOCKS,
        "max-model-len": MAX_MODEL_LEN,
        "recompute-threshold": 1,
        "min-verified": 64,
        # Slow enough that a test can come in between.
        "decode-step-s": 0.001,
    }
    options = SimulatedEngine(
        connector=agents,
        ttl_s=TTL_S,
        lease_s=_lease_s(agents),
        flags=["--store-responses", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))],
    )
    kind = _Kind(
        place=partial(EnginePlace, python=Path(), model=Path()),
        spec=partial(simulated_spec, options=options, ports=SimulatedPorts()),
        nixl=importlib.import_module("backhaul_simulator.notifications"),
        vocabulary=range(300, 40_000),
        ttl_s=TTL_S,
        lease_s=_lease_s(agents),
        timeout_s=20,
    )
    with _running(folder, kind, agents=agents) as engines:
        yield engines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What tells simulated engines from real ones."""

    place: Callable[..., EnginePlace]
    spec: Callable[[EnginePlace], ProcessSpec]
    nixl: Any
    """The module that makes NIXL agents that these engines hear."""
    vocabulary: Sequence[int]
    ttl_s: float
    lease_s: float
    timeout_s: float


def _lease_s(agents: bool) -> float:
    return LEASE_S if agents else STOCK_LEASE_S


@contextmanager
def _running(folder: Path, kind: _Kind, *, agents: bool) -> Iterator[Engines]:
    ports = Ports()
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor(folder / "logs"))
        engines: dict[str, Engine] = {}
        for name in ("prefill", "decode"):
            # Unix socket paths are limited to 107 bytes: names are short.
            agent = stack.enter_context(AgentPeer(folder / f"{name[0]}.sock")) if agents else None
            place = kind.place(
                name=name,
                http_port=ports.take(),
                side_channel_port=ports.take(),
                agent_socket=agent.path if agent is not None else None,
                kv_events_port=ports.take(),
            )
            engine = engines[name] = Engine(
                f"http://{HOST}:{place.http_port}",
                supervisor.start(kind.spec(place)),
                side_channel_port=place.side_channel_port,
                kv_events_port=place.kv_events_port or 0,
                nixl=kind.nixl,
                ttl_s=kind.ttl_s,
                lease_s=kind.lease_s,
                timeout_s=kind.timeout_s,
            )
            if agent is not None:
                engine.agent = agent
            stack.callback(engine.close)
        for name, engine in engines.items():
            supervisor.wait_until(name, partial(http_ready, f"{engine.url}/health"), timeout_s=240)
        yield Engines(engines["prefill"], engines["decode"], kind.vocabulary)
