"""Real engines, one per connector and manner of its agent, that play the same turns one after the other."""

import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from backhaul_local.engines import MODEL_NAME, EngineOptions, EnginePlace, engine_spec, kv_transfer_config
from backhaul_local.ports import HOST, Ports
from backhaul_local.probes import http_ready
from backhaul_local.processes import LocalError, ProcessSpec, Supervisor
from backhaul_local.progress import Steps
from benchmarks.connector.arms import AGENTS, STOCK

_ROOT = Path(__file__).parents[2]
_REPLY = 64
_START_S = 300
_TIMEOUT_S = 600.0
_TTL_S = 1
"""An engine that retains something steps without pause, and takes the cores from those that are measured."""


def run(python: Path, model: Path, state: Path, *, tokens: Sequence[int], rounds: int, steps: Steps) -> Iterator[Any]:
    """Yields one measurement after the other. Raises LocalError when an engine cannot be run."""
    with _engines(python, model, state, max(tokens), steps) as clients:
        words = random.Random("words").choices(range(300, 1000), k=max(tokens))
        for count in tokens:
            steps.begin(f"Engines: {count} tokens")
            # In the first one the prompt is computed; in the others it is found cached.
            for number in range(1 + rounds):
                for arm, client in clients.items():
                    _turn(client, words[:count], _label(number) if arm != STOCK else None)
            steps.end(f"Engines: {count} tokens")
    for arm in clients:
        lines = [json.loads(line) for line in (state / f"{arm}.jsonl").read_text().splitlines()]
        for count in tokens:
            yield from ({"arm": arm, **line} for line in [one for one in lines if one["tokens"] == count][1:])


@contextmanager
def _engines(
    python: Path, model: Path, state: Path, most_tokens: int, steps: Steps
) -> Iterator[Mapping[str, httpx2.Client]]:
    ports = Ports()
    with Supervisor(state / "logs") as supervisor, ExitStack() as stack:
        urls = {}
        for arm in (STOCK, *AGENTS):
            socket = state / f"{arm}.sock"
            if AGENTS.get(arm):
                supervisor.start(_peer(arm, socket))
            place = EnginePlace(
                name=arm,
                python=python,
                model=model,
                http_port=ports.take(),
                side_channel_port=ports.take(),
                agent_socket=socket,
            )
            urls[arm] = f"http://{HOST}:{place.http_port}"
            steps.begin(_starting(arm))
            supervisor.start(_spec(place, state / f"{arm}.jsonl", most_tokens))
        ready = {arm: partial(http_ready, f"{url}/health") for arm, url in urls.items()}
        supervisor.wait_for_all(ready, _START_S, lambda arm: steps.end(_starting(arm)), steps.waiting)
        yield {
            arm: stack.enter_context(httpx2.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False))
            for arm, url in urls.items()
        }


def _starting(arm: str) -> str:
    return f"Starting the engine: {arm}"


def _peer(arm: str, socket: Path) -> ProcessSpec:
    command = [sys.executable, "-m", "benchmarks.connector.peer", str(socket), AGENTS[arm]]
    return ProcessSpec(name=f"agent-{arm}", command=command, env=_importable())


def _importable() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))}


def _spec(place: EnginePlace, figures: Path, most_tokens: int) -> ProcessSpec:
    base = EngineOptions(ttl_s=_TTL_S)
    transfer = {**kv_transfer_config(base), "kv_connector_module_path": "benchmarks.connector.timed"}
    longest = str(most_tokens + 2 * _REPLY)
    flags = {
        "kv-transfer-config": json.dumps(transfer),
        "max-model-len": longest,
        "hf-overrides": json.dumps({"max_position_embeddings": int(longest)}),
    }
    env = {
        **_importable(),
        "BACKHAUL_BENCH_CONNECTOR": STOCK if place.name == STOCK else "backhaul",
        "BACKHAUL_BENCH_FIGURES": str(figures),
    }
    options = EngineOptions(
        ttl_s=_TTL_S, flags=[part for name, value in flags.items() for part in (f"--{name}", value)], env=env
    )
    return engine_spec(place, options)


def _label(number: int) -> dict[str, Any]:
    return {"backhaul": {"scope": "scope", "keys": [f"key-{number}"]}}


def _turn(client: httpx2.Client, prompt: Sequence[int], params: Mapping[str, Any] | None) -> None:
    """Plays a turn at a decode engine alone. Raises LocalError."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "temperature": 0,
        "max_tokens": _REPLY,
        "ignore_eos": True,
    }
    asked = body if params is None else {**body, "kv_transfer_params": params}
    try:
        answer = client.post("/v1/completions", json=asked)
    except httpx2.HTTPError as error:
        raise LocalError(f"a turn was not answered: {error!r}") from error
    if answer.status_code != 200:
        raise LocalError(f"a turn was answered with {answer.status_code}: {answer.text[:500]}")
