"""Real engines for tests. Without the engine environment the tests fail and say how to get it; nothing is skipped."""

import os
import subprocess
from pathlib import Path

import pytest

import backhaul_local

ROOT = Path(__file__).parents[2]


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
