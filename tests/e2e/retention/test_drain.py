"""A decode node that is drained, or whose agent is ended, lets running turns end and leaves nothing behind."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from backhaul.agent.v1 import agent_pb2
from backhaul_local.stack import Stack
from tests.e2e.retention.conftest import CLAIM_TTL_S, LEASE_TTL_S, SOON_S, Foreign
from tests.e2e.retention.owner import Owner
from tests.e2e.stack.chat import Chat, opening
from tests.e2e.stack.conftest import conversation, eventually, eventually_warm

pytestmark = pytest.mark.timeout(240)

AGENT = "agent-decode-1"
TOKENS = 1200
"""Of a turn that runs for seconds."""
SEEN_S = 1.5
"""An agent looks once a second at what runs; one that ends goes by what it saw last, for its engine goes on."""
LEAVES_S = 30.0
"""Within which a node leaves on which nothing runs; some two seconds."""


@pytest.fixture
def served_again(owner: Owner, stack: Stack, any_chat: Chat) -> Iterator[None]:
    """Afterwards the node has an agent as before."""
    yield
    if stack.process(AGENT).running:
        stack.kill(AGENT)
    stack.restart(AGENT)
    within_s = LEASE_TTL_S + CLAIM_TTL_S + 30
    eventually(lambda: any_chat.send(opening()).status == 200, within_s)
    eventually_warm(any_chat, within_s)


def _drain(owner: Owner, _stack: Stack) -> Callable[[], bool]:
    """Drains the node; returns whether it has left and its agent says so."""
    assert owner.stub.Drain(agent_pb2.DrainRequest(), timeout=10).phase == agent_pb2.DRAIN_PHASE_DRAINING
    # Asked again, it says how far it is.
    return lambda: (
        owner.stub.Drain(agent_pb2.DrainRequest(), timeout=10).phase == agent_pb2.DRAIN_PHASE_LEFT
        and owner.stub.Drain(agent_pb2.DrainRequest(), timeout=10).remaining_count == 0
    )


def _end(_owner: Owner, stack: Stack) -> Callable[[], bool]:
    """Ends the agent; returns whether it has ended in good order."""
    stack.process(AGENT).signal(signal.SIGTERM)
    return lambda: stack.process(AGENT).exit_code == 0


@pytest.mark.parametrize("leave", [pytest.param(_drain, id="Drain"), pytest.param(_end, id="SIGTERM")])
@pytest.mark.usefixtures("served_again")
def test_a_running_turn_ends_whole_then_the_node_leaves_and_holds_only_what_is_not_its_own(
    chat: Chat, owner: Owner, stack: Stack, foreign: Foreign, leave: Callable[[Owner, Stack], Callable[[], bool]]
) -> None:
    conversation(chat)
    held = owner.new_set()
    messages = opening()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(chat.send, messages, tokens=TOKENS)
        eventually(lambda: owner.engine.metric("vllm:num_requests_running") == 1, within_s=30)
        time.sleep(SEEN_S)
        left = leave(owner, stack)

        # What nobody reads is freed while the turn still runs.
        eventually(lambda: owner.sets() == [], within_s=SOON_S)
        assert owner.refusal(held) == "DRAINING"
        assert owner.pointers(held) == 0
        assert not running.done()
        assert "decode-1" in owner.node_names()
        reply = running.result()

    assert (reply.status, reply.usage["completion_tokens"]) == (200, TOKENS)
    assert reply.raw.rstrip().endswith("data: [DONE]")
    eventually(left, within_s=LEAVES_S)
    assert "decode-1" not in owner.node_names()
    eventually(lambda: owner.used() == foreign.block_count, within_s=SOON_S)
