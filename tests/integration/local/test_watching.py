"""A stack that is watched: agents may be told to end, nothing else may."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul_local.options import StackOptions
from backhaul_local.processes import LocalError
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    options = StackOptions(
        state=tmp_path / "state",
        prefill=[SimulatedEngine()],
        decode=[SimulatedEngine(ttl_s=480)],
        agent_flags=["--drain-s", "0"],
    )
    with Stack(options) as stack:
        yield stack


@pytest.mark.timeout(180)
def test_an_agent_that_is_told_to_end_is_started_again_and_the_rest_goes_on(stack: Stack) -> None:
    said: list[str] = []
    before = stack.process("agent-decode-1").pid

    def say(text: str) -> None:
        said.append(text)
        if text == "agent-decode-1 is started again.":
            stack.wait_ready("agent-decode-1")
            os.kill(stack.process("registry-1").pid, signal.SIGTERM)

    os.kill(before, signal.SIGTERM)
    with pytest.raises(LocalError, match="registry-1 ended with exit code 0"):
        stack.watch(say, restart_s=0)
    assert said == [
        "agent-decode-1 has ended, as it was told to. Its engine goes on; agent-decode-1 starts again in 0 s.",
        "agent-decode-1 is started again.",
    ]
    assert stack.process("agent-decode-1").pid != before


@pytest.mark.timeout(180)
def test_an_agent_that_is_killed_ends_the_stack(stack: Stack) -> None:
    os.kill(stack.process("agent-decode-1").pid, signal.SIGKILL)
    with pytest.raises(LocalError, match="agent-decode-1 ended with exit code -9"):
        stack.watch(print)
