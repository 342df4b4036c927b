"""The other commands, against the same stack: what they print, and how they end."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from backhaul_local.stack import Stack
from tests.e2e.doctor.conftest import Findings, Run
from tests.e2e.stack.chat import Chat, opening
from tests.e2e.stack.conftest import eventually


@pytest.fixture(scope="module")
def chat(faulty_stack: Stack) -> Iterator[Chat]:
    chat = Chat(faulty_stack.routers[0], headers={"x-session-id": "talk"})
    with closing(chat.http):
        yield chat


@pytest.fixture(scope="module")
def set_id(backhaul: Run, chat: Chat) -> str:
    """A block set that a turn of the conversation ``talk`` left at decode-1."""
    found: list[str] = []

    def held() -> bool:
        assert chat.send(opening()).status == 200
        answer = backhaul("conversation", "talk", "--json")
        sets = answer.document if answer.code == 0 else []
        found[:] = [one["set_id"] for one in sets if one["at_owner"] and one["node_id"] == "decode-1"]
        return bool(found)

    eventually(held, within_s=60)
    return found[0]


def test_nodes_says_who_is_there_and_who_can_reuse_blocks(backhaul: Run, findings: Findings) -> None:
    answer = backhaul("nodes")
    assert answer.code == 0
    for name in ("prefill-1", "decode-1", "bidirectional_kv_xfer", "backhaul-demo"):
        assert name in answer.text
    listed = {one["node_id"]: one["engines"][0]["reuse"] for one in backhaul("nodes", "--json").document}
    assert (listed["decode-1"], listed["decode-2"]) == (True, False)


def test_a_conversation_leads_to_its_block_set_and_its_owner_says_how_long_it_is_kept(
    backhaul: Run, set_id: str
) -> None:
    answer = backhaul("conversation", "talk")
    assert (answer.code, set_id in answer.text, "held" in answer.text) == (0, True, True)


def test_blocks_lists_what_a_node_holds(backhaul: Run, set_id: str) -> None:
    answer = backhaul("blocks", "decode-1")
    assert (answer.code, set_id in answer.text) == (0, True)


def test_blocks_says_which_nodes_do_not_tell_and_ends_with_3(backhaul: Run, set_id: str) -> None:
    answer = backhaul("blocks")
    assert answer.code == 3
    assert set_id in answer.text
    assert "decode-2" in answer.text.splitlines()[-1]


def test_a_trace_is_what_a_block_set_and_the_logs_tell(backhaul: Run, faulty_stack: Stack, chat: Chat) -> None:
    request_id = chat.send(opening()).headers["x-request-id"]
    log = faulty_stack.logs / "router-1.log"
    eventually(lambda: request_id in log.read_text(), within_s=10)
    answer = backhaul("trace", request_id, "--log", str(log))
    # One agent cannot be asked.
    assert answer.code == 3
    assert "route=" in answer.text or '"route"' in answer.text


def test_release_frees_a_conversation_and_then_it_is_not_found(backhaul: Run, set_id: str) -> None:
    answer = backhaul("release", "--conversation", "talk", "--json")
    assert answer.code == 0
    assert answer.document["released_count"] + answer.document["deferred_count"] >= 1
    eventually(lambda: backhaul("conversation", "talk").code == 5, within_s=20)


def test_release_says_which_block_sets_a_node_does_not_hold(backhaul: Run) -> None:
    answer = backhaul("release", "--node", "decode-1", "no-such-set")
    assert answer.code == 5
    assert "no-such-set" in answer.text


def test_explain_shows_the_ways_of_a_turn_and_who_was_removed(backhaul: Run) -> None:
    body = json.dumps({"model": "backhaul-demo", "messages": opening()}).encode()
    answer = backhaul("explain", "-", given=body)
    assert answer.code == 0
    assert "cold" in answer.text
    assert backhaul("explain", "-", "--json", given=body).document["route"] == "cold"


def test_top_shows_each_node_once_per_look(backhaul: Run) -> None:
    answer = backhaul("top", "--json", "--count", "2", "--every-s", "0.2")
    looks = [json.loads(line) for line in answer.text.splitlines()]
    assert len(looks) == 2
    loads = {load["node_id"]: load for load in looks[-1]}
    assert loads["decode-2"]["problem"]
    assert not loads["decode-1"]["problem"]
    assert backhaul("top", "--count", "2", "--every-s", "0.2").text.count("prefill-1") == 2


def test_the_shell_completes_nodes(backhaul: Run, faulty_stack: Stack) -> None:
    command = [sys.executable, "-m", "backhaul_cli"]
    words = f"backhaul blocks --registry {faulty_stack.registries[0]} decode-"
    env = {"_BACKHAUL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "4"}
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)
    assert [line for line in done.stdout.splitlines() if line.endswith("decode-4")]


def test_a_drained_node_leaves(backhaul: Run, findings: Findings) -> None:
    answer = backhaul("drain", "decode-4", "--within-s", "1", "--wait")
    assert (answer.code, answer.text.splitlines()[-1].startswith("decode-4 has left")) == (0, True)
    eventually(lambda: backhaul("blocks", "decode-4").code == 5, within_s=20)
