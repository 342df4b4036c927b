"""Other vLLM releases get vLLM's own connector, and say so once."""

import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

SCRIPT = """
import logging
logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
import vllm
vllm.__version__ = "{version}"
import backhaul_connector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
first, second = backhaul_connector.NixlConnector, backhaul_connector.NixlConnector
print("same", first is second, "stock", first is NixlConnector, "subclass", issubclass(first, NixlConnector))
"""


def _run(python: Path, version: str) -> str:
    script = SCRIPT.format(version=version)
    done = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_an_unknown_release_gets_the_stock_connector_with_one_warning(engine_python: Path) -> None:
    output = _run(engine_python, "0.33.1")

    assert "same True stock True" in output
    assert output.count("vLLM 0.33.1 is not supported") == 1


def test_a_build_of_the_supported_release_gets_ours(engine_python: Path) -> None:
    assert "same True stock False subclass True" in _run(engine_python, "0.32.0+cpu")
