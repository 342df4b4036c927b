"""Real child processes: whatever becomes of the launcher, nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backhaul_local.etcd import EtcdMember, etcd_binary, etcd_spec
from backhaul_local.ports import Ports
from backhaul_local.probes import http_ready
from backhaul_local.processes import LocalError, ProcessSpec, Supervisor

SHELL = ["sh", "-c"]

LAUNCHER = """
import sys, time
from pathlib import Path
from backhaul_local.interrupts import raise_on_signals
from backhaul_local.processes import ProcessSpec, Supervisor

raise_on_signals()
with Supervisor(Path(sys.argv[1]), grace_s=1) as supervisor:
    for number in range(3):
        command = ["sh", "-c", "trap '' TERM; sleep 600.$0 & wait; sleep 600.$0", sys.argv[2]]
        supervisor.start(ProcessSpec(name=f"child-{number}", command=command))
        print("started", flush=True)
    time.sleep(600)
"""
"""Starts three stubborn children, each with a child of its own."""


def wait_for(happened: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def alive(mark: str) -> list[int]:
    """Returns the processes whose command line carries the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in command:
                found.append(int(folder.name))
    return found


@pytest.fixture
def mark() -> str:
    return f"7{time.time_ns()}"


@pytest.fixture
def launcher(tmp_path: Path, mark: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "logs") as running:
        yield running


def until_started(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "started\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_stays_behind_when_the_launcher_is_ended(
    launcher: "subprocess.Popen[str]", mark: str, number: signal.Signals
) -> None:
    until_started(launcher)
    wait_for(lambda: len(alive(mark)) >= 7)

    launcher.send_signal(number)

    wait_for(lambda: not alive(mark))


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_nothing_stays_behind_when_the_launcher_is_killed_while_it_starts(
    launcher: "subprocess.Popen[str]", mark: str, delay_s: float
) -> None:
    time.sleep(delay_s)

    launcher.kill()

    wait_for(lambda: not alive(mark))


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(supervisor: Supervisor, mark: str) -> None:
    command = [*SHELL, "trap '' TERM; echo up; while :; do sleep 0.1; done", mark]
    process = supervisor.start(ProcessSpec(name="stubborn", command=command))
    wait_for(lambda: "up" in process.log_tail())

    supervisor.stop([process], grace_s=0.5)

    assert process.exit_code == -signal.SIGKILL
    # A child that it was just about to make ends by itself.
    wait_for(lambda: not alive(mark))


def test_a_frozen_process_can_be_stopped_in_good_order(supervisor: Supervisor) -> None:
    process = supervisor.start(
        ProcessSpec(name="frozen", command=[*SHELL, "trap 'exit 3' TERM; echo up; sleep 9 & wait"])
    )
    wait_for(lambda: "up" in process.log_tail())
    process.freeze()

    supervisor.stop([process], grace_s=10)

    assert process.exit_code == 3


def test_a_process_that_ends_while_one_waits_for_it_is_reported_with_its_log(supervisor: Supervisor) -> None:
    supervisor.start(ProcessSpec(name="broken", command=[*SHELL, "echo no such port >&2; exit 4"]))

    with pytest.raises(LocalError, match=r"broken ended with exit code 4(?s:.*)no such port"):
        supervisor.wait_until("broken", lambda: False, timeout_s=20)


def test_a_command_that_does_not_exist_is_reported(supervisor: Supervisor) -> None:
    supervisor.start(ProcessSpec(name="missing", command=["no-such-command"]))

    with pytest.raises(LocalError, match="cannot run no-such-command"):
        supervisor.wait_until("missing", lambda: False, timeout_s=20)


def test_a_process_that_never_gets_ready_is_reported(supervisor: Supervisor) -> None:
    supervisor.start(ProcessSpec(name="slow", command=["sleep", "60"]))

    with pytest.raises(LocalError, match="slow was not ready"):
        supervisor.wait_until("slow", lambda: False, timeout_s=0.3)


def test_a_name_cannot_run_twice(supervisor: Supervisor) -> None:
    spec = ProcessSpec(name="one", command=["sleep", "60"])
    supervisor.start(spec)

    with pytest.raises(LocalError, match="already running"):
        supervisor.start(spec)


@pytest.mark.etcd
def test_etcd_keeps_its_data_over_a_kill_and_a_restart(supervisor: Supervisor, tmp_path: Path) -> None:
    ports = Ports()
    member = EtcdMember(name="etcd", client_port=ports.take(), peer_port=ports.take(), data=tmp_path / "etcd")
    address = member.endpoint
    etcdctl = [str(etcd_binary().with_name("etcdctl")), f"--endpoints={address}"]
    supervisor.start(etcd_spec(member, [member]))
    supervisor.wait_until("etcd", lambda: http_ready(f"http://{address}/health"), timeout_s=20)
    subprocess.run([*etcdctl, "put", "key", "kept"], check=True, capture_output=True)

    supervisor.kill("etcd")
    supervisor.restart("etcd")
    supervisor.wait_until("etcd", lambda: http_ready(f"http://{address}/health"), timeout_s=20)

    found = subprocess.run([*etcdctl, "get", "key"], check=True, capture_output=True, text=True)
    assert found.stdout == "key\nkept\n"
