"""Environments are made once, made anew when something changed, and never left half made."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backhaul_local.install import Environment, Installer, lock
from backhaul_local.processes import LocalError, Supervisor

RECORD = "import pathlib, sys; f = pathlib.Path(sys.prefix).parent / 'runs'; f.open('a').write('x')"


@pytest.fixture
def installer(tmp_path: Path) -> Iterator[Installer]:
    with Supervisor(tmp_path / "logs") as supervisor:
        yield Installer(supervisor, venv_flags=["--without-pip"])


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    (tmp_path / "lock.txt").write_text("a==1\n")
    return Environment(path=tmp_path / ".venv", sources=[tmp_path / "lock.txt"], commands=[["-c", RECORD]])


def runs(environment: Environment) -> int:
    return len((environment.path.parent / "runs").read_text())


def test_an_environment_is_made_once(installer: Installer, environment: Environment) -> None:
    installer.ensure(environment)
    installer.ensure(environment)

    assert runs(environment) == 1


def test_an_environment_is_made_anew_when_its_lock_changes(installer: Installer, environment: Environment) -> None:
    installer.ensure(environment)
    leftover = environment.path / "leftover"
    leftover.touch()
    environment.sources[0].write_text("a==2\n")

    installer.ensure(environment)

    assert runs(environment) == 2
    assert not leftover.exists()


def test_a_half_made_environment_is_made_anew(installer: Installer, environment: Environment) -> None:
    broken = replace(environment, commands=[["-c", "raise SystemExit(1)"]])
    with pytest.raises(LocalError):
        installer.ensure(broken)

    installer.ensure(environment)

    assert runs(environment) == 1


def test_noise_is_hidden_and_progress_is_shown(
    installer: Installer, environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "WARNING: Location 'x' is ignored: it is nothing.\\nDownloading a.whl (9 MB)\\nCollecting b"
    installer.ensure(replace(environment, commands=[["-c", f"print({said!r}.replace(chr(92) + 'n', chr(10)))"]]))

    shown = capsys.readouterr().out
    assert "  Downloading a.whl (9 MB)\n" in shown
    assert "ignored" not in shown
    assert "Collecting" not in shown


def test_a_failure_shows_what_was_said(installer: Installer, environment: Environment) -> None:
    command = ["-c", "raise SystemExit('ERROR: no such version')"]
    with pytest.raises(LocalError, match="ERROR: no such version"):
        installer.ensure(replace(environment, commands=[command]))


def test_a_missing_pytorch_build_is_explained(installer: Installer, environment: Environment) -> None:
    command = ["-c", "raise SystemExit('ERROR: No matching distribution found for torch==2.13.0+cpu')"]
    with pytest.raises(LocalError, match="PIP_EXTRA_INDEX_URL"):
        installer.ensure(replace(environment, commands=[command]))


def test_who_waits_for_another_installation_says_so_at_once(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from backhaul_local.install import lock\n"
    script += "with lock(Path(sys.argv[1])): print('mine', flush=True)"
    with lock(tmp_path):
        other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "waiting for another make that installs into this checkout ...\n"
    assert other.communicate(timeout=30)[0] == "mine\n"
