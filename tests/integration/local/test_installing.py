"""Environments are made once, made anew when something changed, and never left half made."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backhaul_local.install import Environment, Installer
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
