"""The engines of these tests, with nothing cached or pinned by an earlier test."""

import json
import time
from pathlib import Path

import pytest

from tests.e2e.connector.pair import Engine, Pair


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
