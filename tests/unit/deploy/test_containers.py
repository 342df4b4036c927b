"""The images: what is copied and installed, who runs them, and what they are started with."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from backhaul_common import call
from tests.unit.deploy import started
from tests.unit.deploy.cluster import ROOT, image_name
from tests.unit.deploy.dockerfiles import DOCKERFILES, env_of, read, values

SERVICES = [path for path in DOCKERFILES if f"backhaul-{path.stem}" in started.CONFIGS]


def projects() -> dict[str, tuple[str, list[str]]]:
    """Returns each distribution's folder, and the others of ours that it depends on."""
    found = {}
    for file in (
        file for where in ("proto", "services/**", "deploy/*") for file in ROOT.glob(f"{where}/pyproject.toml")
    ):
        project = tomllib.loads(file.read_text())["project"]
        ours = [part.split("==")[0] for part in project["dependencies"] if part.startswith("backhaul-")]
        found[project["name"]] = (str(file.parent.relative_to(ROOT)), ours)
    return found


def needed_by(name: str) -> set[str]:
    """Returns the folders that have to be installed for a distribution, its own included."""
    folder, ours = projects()[name]
    return {folder}.union(*(needed_by(other) for other in ours))


def copied_by(path: Path) -> list[str]:
    """Returns what a Dockerfile copies out of the repository."""
    return [
        source for value in values(path, "COPY") if not value.startswith("--from=") for source in value.split()[:-1]
    ]


def installed_by(path: Path) -> set[str]:
    """Returns the folders that a Dockerfile installs."""
    words = shlex.split(" ".join(run for run in values(path, "RUN") if "pip install" in run))
    return {word.removeprefix("./") for word in words if word.startswith("./")}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
class TestEveryImage:
    def test_is_made_of_files_that_are_there_and_in_the_context(self, path: Path) -> None:
        kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
        assert copied_by(path)
        for source in copied_by(path):
            assert (ROOT / source).exists()
            assert any(source == entry or source.startswith(f"{entry}/") for entry in kept)

    def test_installs_only_what_was_copied(self, path: Path) -> None:
        assert installed_by(path)
        for folder in installed_by(path):
            assert any(folder == source or folder.startswith(f"{source}/") for source in copied_by(path))

    def test_is_bound_to_versions(self, path: Path) -> None:
        assert "PIP_CONSTRAINT=/src/constraints.txt" in values(path, "ENV")
        base = "".join(values(path, "ARG")).partition("=")[2]
        for image in values(path, "FROM"):
            assert re.search(r":[0-9]", image.replace("${PYTHON_IMAGE}", base)), f"{image} names no version"

    def test_is_run_by_a_user_with_a_number_that_is_not_root(self, path: Path) -> None:
        instructions = read(path)
        last_stage = instructions[max(place for place, one in enumerate(instructions) if one.name == "FROM") :]
        user = [one.value for one in last_stage if one.name == "USER"][-1]
        assert re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", user)


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)
class TestAServicesImage:
    def test_installs_what_the_service_needs_and_nothing_else(self, path: Path) -> None:
        assert installed_by(path) == needed_by(f"backhaul-{path.stem}")

    def test_listens_where_it_says(self, path: Path) -> None:
        given = {name: value for name, value in env_of(path).items() if name.startswith("BACKHAUL_")}
        # What the image cannot know.
        args = {"router": ["--registry=r:1"], "node-agent": ["--advertise=a:1"]}.get(path.stem, [])
        settings = started.config(f"backhaul-{path.stem}", args, given)
        assert started.ports(settings) == {int(port) for port in " ".join(values(path, "EXPOSE")).split()}

    def test_starts_the_service(self, path: Path) -> None:
        (folder,) = needed_by(f"backhaul-{path.stem}") - {"proto", "services/common", "services/node-agent/connector"}
        scripts = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["scripts"]
        assert json.loads(values(path, "ENTRYPOINT")[-1]) == [f"backhaul-{path.stem}"]
        assert f"backhaul-{path.stem}" in scripts

    def test_is_asked_for_its_health_at_a_port_where_it_listens(self, path: Path) -> None:
        command = json.loads(values(path, "HEALTHCHECK")[0].partition("CMD ")[2])
        assert command[:3] == ["python", "-m", "backhaul_common.call"]
        address, method, request = command[3:6]
        assert address.rpartition(":")[2] in " ".join(values(path, "EXPOSE")).split()
        assert call._method(method).name == "Check"
        assert json.loads(request) == {"service": "liveness"}


def test_simulated_engines_bring_an_agent_that_talks_to_them() -> None:
    path = ROOT / "deploy" / "docker" / "simulator.Dockerfile"
    assert installed_by(path) == needed_by("backhaul-simulator") | needed_by("backhaul-node-agent")
    site, package, rest = env_of(path)["PYTHONPATH"].partition("backhaul_simulator")
    assert site.startswith(f"/opt/backhaul/lib/python{re.findall(r'python:([0-9.]+)', path.read_text())[0]}/")
    assert (ROOT / "deploy" / "simulator" / "src" / (package + rest) / "nixl").is_dir()


def test_there_is_an_image_for_each_service() -> None:
    assert {f"backhaul-{path.stem}" for path in DOCKERFILES} >= set(started.CONFIGS)
    assert image_name("registry.example.com:5000/backhaul-router:0.1.0") == "backhaul-router"
