"""What commands print of the answers that they get: JSON for programs, and `top` anew in the same place."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from backhaul.agent.v1 import agent_pb2 as pb
from backhaul.registry.v1 import registry_pb2
from backhaul.router.v1 import conversation_pb2
from backhaul_cli.__main__ import cli
from backhaul_cli.exits import Exit
from backhaul_cli.services import Services
from backhaul_common.errors import UnavailableError

HELD = pb.BlockSet(set_id="chatcmpl-1", state=pb.BLOCK_SET_STATE_HELD, token_count=640, block_count=20)
DRAINING = pb.DrainResponse(phase=pb.DRAIN_PHASE_DRAINING, running_count=3)
LEFT = pb.DrainResponse(phase=pb.DRAIN_PHASE_LEFT)
UP = "\x1b[1A"
"""Moves a terminal's cursor to the line above."""


@pytest.fixture(autouse=True)
def _cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """decode-1 holds a block set; decode-2's agent does not answer."""
    nodes = [registry_pb2.Node(node_id=name, agent_address=name) for name in ("decode-1", "decode-2")]

    def block_sets(_: Services, address: str) -> list[pb.BlockSet]:
        if address == "decode-2":
            raise UnavailableError("UNAVAILABLE", "refused")
        return [HELD]

    monkeypatch.setattr(Services, "nodes", lambda _: nodes)
    monkeypatch.setattr(Services, "block_sets", block_sets)
    monkeypatch.setattr(Services, "loads", lambda _, __: [pb.EngineLoad(running_count=2, kv_usage=0.5)])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def document(result: Result) -> Any:
    """Returns what a program reads; what is wrong goes elsewhere."""
    return json.loads(result.stdout)


def test_blocks_names_the_node_of_each_set_and_who_did_not_say() -> None:
    result = run("blocks", "--json")
    assert result.exit_code == Exit.UNREACHABLE
    (held,) = document(result)["block_sets"]
    assert (held["node_id"], held["set_id"], held["state"]) == ("decode-1", "chatcmpl-1", "BLOCK_SET_STATE_HELD")
    assert [*document(result)["unreachable"]] == ["decode-2"]
    assert document(run("blocks", "decode-1", "--json"))["unreachable"] == {}


def test_a_conversation_whose_owner_does_not_say_is_shown_and_not_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    held = (("decode-1", "chatcmpl-1"), ("decode-2", "chatcmpl-2"))
    sets = [conversation_pb2.HeldSet(node_id=node_id, set_id=set_id) for node_id, set_id in held]
    found = conversation_pb2.FindConversationResponse(held=sets)
    monkeypatch.setattr(Services, "at_the_router", lambda *_: found)
    result = run("conversation", "session-1", "--json")
    assert result.exit_code == Exit.UNREACHABLE
    first, second = document(result)
    assert (first["at_owner"]["state"], first["owner_problem"]) == ("BLOCK_SET_STATE_HELD", "")
    assert (second["at_owner"], second["owner_problem"]) == (None, "refused (UNAVAILABLE)")
    shown = run("conversation", "session-1")
    assert shown.exit_code == Exit.UNREACHABLE
    assert "unknown" in shown.stdout


def test_trace_has_block_sets_and_lines_of_logs(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text('{"event": "turn", "set": "chatcmpl-1"}\n')
    found = document(run("trace", "chatcmpl-1", "--log", str(log), "--json"))
    assert [one["node_id"] for one in found["block_sets"]] == ["decode-1"]
    assert found["log_lines"] == [{"file": str(log), "line": '{"event": "turn", "set": "chatcmpl-1"}'}]


def test_drain_prints_one_document_or_one_line_each_second_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([DRAINING, DRAINING, LEFT])
    owner = SimpleNamespace(Drain=lambda _, timeout: next(answers))
    monkeypatch.setattr(Services, "agent", lambda _, __: owner)
    monkeypatch.setattr("time.sleep", lambda _: None)
    once = document(run("drain", "decode-1", "--json"))
    assert (once["node_id"], once["phase"], once["running_count"]) == ("decode-1", "DRAIN_PHASE_DRAINING", 3)
    lines = [json.loads(line) for line in run("drain", "decode-1", "--wait", "--json").stdout.splitlines()]
    assert [line["phase"] for line in lines] == ["DRAIN_PHASE_DRAINING", "DRAIN_PHASE_LEFT"]


def test_top_shows_each_look_in_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=160)
    monkeypatch.setattr("backhaul_cli.commands.top.console", lambda: terminal)
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert run("top", "--count", "3").exit_code == Exit.DONE
    first, *others = screen.getvalue().split("2 nodes")[:-1]
    assert UP not in first
    assert len(others) >= 2
    assert all(UP in between for between in others)
