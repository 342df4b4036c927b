"""Fixtures that start real engines. Without the engine environment tests fail and say how to get it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

import backhaul_local
from backhaul_local.engines import EngineOptions, EnginePlace, engine_spec
from backhaul_local.ports import HOST, Ports
from backhaul_local.probes import http_ready
from backhaul_local.processes import Supervisor
from tests.e2e.connector.nixl_peer import NixlPeer
from tests.e2e.connector.pair import Engine
from tests.fakes.agent_peer import AgentPeer

ROOT = Path(__file__).parents[1]


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


BLOCKS = 110
"""Of 32 tokens each: room for one long request, too little for two."""

TTL_S = 20.0


@pytest.fixture(scope="session")
def engines(
    engine_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Engine]]:
    """A prefill and a decode engine, by name."""
    # Unix socket paths are limited to 107 bytes: pytest's own folders may be longer.
    folder = tmp_path_factory.mktemp("c")
    options = EngineOptions(
        ttl_s=TTL_S,
        lease_s=6,
        num_blocks=BLOCKS,
        flags=("--max-model-len", "3200"),
        extra_config={"kv_recompute_threshold": 1, "backhaul_min_verified": 64},
    )
    ports = Ports()
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor(folder / "logs"))
        engines: dict[str, Engine] = {}
        side_channels = {}
        for name in ("prefill", "decode"):
            agent = stack.enter_context(AgentPeer(folder / f"{name[0]}.sock"))
            place = EnginePlace(
                name=name,
                python=engine_python,
                model=tiny_model,
                http_port=ports.take(),
                side_channel_port=ports.take(),
                agent_socket=agent.path,
            )
            process = supervisor.start(engine_spec(place, options))
            engines[name] = Engine(f"http://{HOST}:{place.http_port}", process, agent)
            side_channels[name] = place.side_channel_port
        for name, engine in engines.items():
            supervisor.wait_until(name, partial(http_ready, f"{engine.url}/health"), timeout_s=240)
        engines["decode"].nixl = NixlPeer(HOST, side_channels["decode"])
        yield engines
        for engine in engines.values():
            engine.http.close()
