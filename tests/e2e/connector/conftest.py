"""One pair of engines for all tests of this folder."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from backhaul_local.engines import EngineOptions, EnginePlace, engine_spec
from backhaul_local.ports import HOST, Ports
from backhaul_local.probes import http_ready
from backhaul_local.processes import Supervisor
from tests.e2e.connector.nixl_peer import NixlPeer
from tests.e2e.connector.pair import Engine, Pair
from tests.fakes.agent_peer import AgentPeer

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


@pytest.fixture
def pair(engines: dict[str, Engine], tiny_model: Path, request: pytest.FixtureRequest) -> Pair:
    """The engines, with nothing cached or pinned by an earlier test."""
    decode = engines["decode"]
    for set_id in decode.retained():
        decode.nixl.release(set_id)
    # The prefill engine's hand-offs that nobody read leave with their lease of 6 s.
    deadline = time.monotonic() + 10
    while not all(engine.forget() for engine in engines.values()):
        assert time.monotonic() < deadline, "blocks of an earlier test stay pinned"
        time.sleep(0.05)
    vocabulary = json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"].values()
    ordinary = [token for token in vocabulary if token > 300]
    return Pair(engines["prefill"], engines["decode"], ordinary, seed=hash(request.node.name))
