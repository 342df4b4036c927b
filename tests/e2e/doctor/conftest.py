"""One stack of simulated parts in which nearly everything is wrong that can be; and the command line against it."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from backhaul_cli.__main__ import cli
from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.stack.conftest import eventually
from tests.soak.network import BreakableNetwork

ETCD_DELAY_S = 0.03
"""Each way between registry and etcd, so that a read takes twice as long."""
NOWHERE = "127.0.0.1:1"
ELSEWHERE = "[::ffff:127.0.0.1]"
"""Loopback in a form that agents do not take for it."""
NO_EVENTS = ("--kv-events", "")
TEMPLATE = ("--template", "drop-reasoning")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, and how it ended."""

    code: int
    text: str

    @property
    def document(self) -> Any:
        return json.loads(self.text)


Run = Callable[..., Answer]
Findings = Sequence[dict[str, str]]


class FaultyNetwork(BreakableNetwork):
    """Slows etcd, has one agent told to be where nobody listens, and one to be on another machine."""

    def between(self, source: str, target: str, address: str) -> str:
        if (source, target) == ("routers", "agent-decode-2"):
            return NOWHERE
        if (source, target) == ("routers", "agent-decode-4"):
            return address.replace("127.0.0.1", ELSEWHERE)
        return super().between(source, target, address)


@pytest.fixture(scope="package")
def faulty_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """prefill-1 and decode-1 are well, but for what all share: a slow etcd, and a template that drops reasoning."""
    no_nixl = tmp_path_factory.mktemp("no-nixl")
    (no_nixl / "nixl").mkdir()
    (no_nixl / "nixl" / "__init__.py").write_text('raise ImportError("there is no nixl here")\n')
    with FaultyNetwork(only=["registry-1 > etcd"]) as network:
        options = StackOptions(
            state=tmp_path_factory.mktemp("doctor"),
            prefill=[SimulatedEngine(flags=TEMPLATE)],
            decode=[
                SimulatedEngine(flags=TEMPLATE),
                SimulatedEngine(connector=False, flags=TEMPLATE, agent_flags=NO_EVENTS),
                SimulatedEngine(flags=("--no-bidirectional", *TEMPLATE), agent_flags=NO_EVENTS),
                SimulatedEngine(
                    ttl_s=8,
                    flags=("--block-size", "16", "--clock-rate-ppm", "20000", *TEMPLATE),
                    agent_env={"PYTHONPATH": _first(no_nixl)},
                ),
            ],
            router_flags=["--prefer", "warm", "--lookup-budget-s", "0.5", "--explain"],
            network=network,
        )
        with Stack(options) as stack:
            network.link("registry-1 > etcd").delay_s = ETCD_DELAY_S
            yield stack


@pytest.fixture(scope="package")
def backhaul(faulty_stack: Stack) -> Run:
    """Runs a command against the stack."""
    places = {
        "BACKHAUL_CLI_REGISTRY": ",".join(faulty_stack.registries),
        "BACKHAUL_CLI_ROUTER": faulty_stack.routers[0],
        "BACKHAUL_CLI_ROUTER_GRPC": faulty_stack.grpc_routers[0],
    }

    def run(*arguments: str, given: bytes = b"") -> Answer:
        result = CliRunner(env=places).invoke(cli, arguments, input=given, catch_exceptions=False)
        return Answer(result.exit_code, result.stdout + ("" if result.exit_code in (0, 6) else result.stderr))

    return run


@pytest.fixture(scope="package")
def findings(backhaul: Run) -> Findings:
    """What doctor says, once agents have seen enough of their engines' clocks."""
    found: list[dict[str, str]] = []

    def complete() -> bool:
        answer = backhaul("doctor", "--json")
        assert answer.code == 6
        found[:] = answer.document
        return {"clock-skew", "connector-missing", "side-channel-local"} <= {one["check"] for one in found}

    eventually(complete, within_s=60)
    return found


def _first(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
