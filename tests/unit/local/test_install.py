"""What decides whether an environment is made anew."""

from dataclasses import replace
from pathlib import Path

import pytest

from backhaul_local.install import Environment, environments

ROOT = Path(__file__).parents[3]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    (tmp_path / "lock.txt").write_text("a==1\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text("x = 1\n")
    return Environment(
        path=tmp_path / ".venv", sources=[tmp_path / "lock.txt", tmp_path / "src"], commands=[["-c", "pass"]]
    )


def test_nothing_changed_means_the_same_digest(environment: Environment) -> None:
    assert environment.digest() == environment.digest()


@pytest.mark.parametrize("file", ["lock.txt", "src/module.py"])
def test_a_changed_source_changes_the_digest(environment: Environment, tmp_path: Path, file: str) -> None:
    before = environment.digest()
    (tmp_path / file).write_text("changed\n")

    assert environment.digest() != before


def test_other_commands_change_the_digest(environment: Environment) -> None:
    assert replace(environment, commands=[["-c", "1"]]).digest() != environment.digest()


def test_every_distribution_decides_about_the_services_environment() -> None:
    services, _, _ = environments(ROOT)

    assert {ROOT / "proto" / "pyproject.toml", ROOT / "services" / "router" / "pyproject.toml"} <= {*services.sources}


def test_the_engines_are_installed_from_the_lock_alone() -> None:
    _, engines, _ = environments(ROOT)

    assert "--no-deps" in engines.commands[0]


def test_the_services_need_neither_vllm_nor_torch() -> None:
    requirements = (ROOT / "requirements-dev.txt").read_text() + (ROOT / "constraints.txt").read_text()

    assert "vllm" not in requirements
    assert "torch" not in requirements
