"""The examples of the Python client, as they are, against a stack of simulated engines."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul_local.options import StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from tests.e2e.stack.chat import Chat
from tests.e2e.stack.conftest import eventually_warm

EXAMPLES = Path(__file__).parents[3] / "clients" / "python" / "examples"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode engine, simulated, once a conversation was seen to be warm."""
    options = StackOptions(
        state=tmp_path_factory.mktemp("examples"),
        prefill=[SimulatedEngine()],
        decode=[SimulatedEngine()],
        # Generous: test machines are busy.
        router_flags=["--prefer", "warm", "--lookup-budget-s", "0.5"],
    )
    with Stack(options) as stack:
        chat = Chat(stack.routers[0])
        eventually_warm(chat)
        chat.http.close()
        yield stack


def run(name: str, *arguments: str) -> str:
    """Returns what an example prints."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"stream_chat.py", "conversation.py", "gateway.py"}


def test_stream_chat_prints_an_answer_and_its_route(stack: Stack) -> None:
    out = run("stream_chat.py", "--address", stack.grpc_routers[0], "Where does the lorry go?")

    answer, route = out.strip().splitlines()[0], out.strip().splitlines()[-1]
    assert answer
    assert route.startswith("(cold, ")


def test_stream_chat_says_what_is_wrong(stack: Stack) -> None:
    arguments = ["--address", stack.grpc_routers[0], "--model", "other", "Why?"]
    command = [sys.executable, str(EXAMPLES / "stream_chat.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    assert (done.returncode, done.stderr.strip()) == (1, "the model 'other' does not exist (MODEL_NOT_FOUND)")


def test_conversation_is_warm_from_its_second_turn_on(stack: Stack) -> None:
    out = run("conversation.py", "--address", stack.grpc_routers[0])

    routes = [line.strip().strip("()").partition(",")[0] for line in out.splitlines() if line.startswith("  (")]
    assert routes == ["cold", "warm", "warm"]


def test_gateway_sends_the_decode_leg_itself(stack: Stack) -> None:
    out = run("gateway.py", "--address", stack.planners[0], "Where does the lorry go?")

    (decode,) = [node for node in stack.nodes if node.role == "decode"]
    assert "data: [DONE]" in out
    assert out.rstrip().endswith(f"(cold, from {decode.url}/v1/chat/completions)")
    assert "kv_transfer_params" not in out
