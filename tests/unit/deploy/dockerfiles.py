"""Dockerfiles, as far as the tests look into them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from tests.unit.deploy.cluster import ROOT

DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))


class Instruction(NamedTuple):
    name: str
    value: str


def read(path: Path) -> list[Instruction]:
    """Returns a Dockerfile's instructions."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [Instruction(*line.split(None, 1)) for line in whole]


def values(path: Path, name: str) -> list[str]:
    return [instruction.value for instruction in read(path) if instruction.name == name]


def env_of(path: Path) -> dict[str, str]:
    """Returns what the last stage sets."""
    last = values(path, "ENV")[-1]
    return dict(part.split("=", 1) for part in shlex.split(last))
