"""A real Prometheus of one's own: loopback only, free port, own data directory."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import pytest
import yaml

from backhaul_local.ports import HOST, Ports

_HOW = (
    "dashboards and alerts are tested with a real Prometheus, and there is none: apt-get install prometheus (Debian, "
    "Ubuntu), or set BACKHAUL_PROMETHEUS to the path of its binary, with promtool beside it"
)


def binary(name: str = "prometheus") -> str:
    """Returns the path of prometheus or promtool. Fails the test when it is not there: a skipped one shows nothing."""
    given = os.environ.get("BACKHAUL_PROMETHEUS", "")
    found = str(Path(given).with_name(name)) if given else shutil.which(name) or ""
    if not Path(found).is_file():
        pytest.fail(_HOW, pytrace=False)
    return found


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs promtool and returns how it went."""
    command = [binary("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


class Prometheus:
    """Starts and stops one Prometheus with one configuration. As a context manager it surely ends it."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx2.Client(base_url=f"http://{HOST}:{(port := Ports().take())}", timeout=30, trust_env=False)
        self._port = port

    def __enter__(self) -> Self:
        file = self._folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(dict(self._config)))
        command = [binary(), f"--config.file={file}", f"--web.listen-address={HOST}:{self._port}"]
        command += [f"--storage.tsdb.path={self._folder / 'data'}", "--log.level=warn"]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.eventually(self._ready, "Prometheus did not start")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def get(self, path: str, **parameters: str | float) -> Any:
        """Asks its API. Raises AssertionError with what it says when it refuses, as a query that cannot be parsed."""
        answer = json.loads(self._http.get(f"/api/v1/{path}", params=parameters).text)
        assert answer["status"] == "success", answer
        return answer["data"]

    def eventually(self, holds: Callable[[], bool], what: str, within_s: float = 60) -> None:
        """Waits until something holds. Raises AssertionError when it does not in time, or Prometheus has ended."""
        deadline = time.monotonic() + within_s
        while not holds():
            assert self._process is not None
            assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx2.TransportError:
            return False
