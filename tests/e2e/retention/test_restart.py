"""An agent that comes back leaves alone what its predecessor may have granted, and then goes on where that stopped."""

import uuid

import pytest

from backhaul.agent.v1 import agent_pb2
from backhaul_local.stack import Stack
from tests.e2e.retention.conftest import CLAIM_TTL_S, LEASE_TTL_S, SOON_S, TTL_S
from tests.e2e.retention.owner import Owner
from tests.e2e.stack.chat import Chat
from tests.e2e.stack.conftest import conversation, eventually

pytestmark = pytest.mark.timeout(180)

FENCED, HELD = agent_pb2.BLOCK_SET_STATE_FENCED, agent_pb2.BLOCK_SET_STATE_HELD


def test_what_a_restarted_agent_finds_is_neither_granted_nor_freed_until_no_claim_can_live_and_then_both(
    chat: Chat, owner: Owner, stack: Stack
) -> None:
    messages, _ = conversation(chat)
    kept = owner.new_set()
    session = uuid.uuid4().hex
    conversation(chat, session=session)
    unwanted = owner.new_set([kept])
    ids = [kept.set_id, unwanted.set_id]
    owner.stub.RenewBlockSets(agent_pb2.RenewBlockSetsRequest(set_ids=ids), timeout=10)
    # Longer than the engine's own time: it has heard of it.
    eventually(lambda: all(one.remaining_ttl.ToTimedelta().total_seconds() > TTL_S for one in owner.sets()), within_s=5)
    stack.kill("agent-decode-1")
    stack.restart("agent-decode-1")

    eventually(lambda: {one.set_id: one.state for one in owner.sets()} == dict.fromkeys(ids, FENCED), within_s=10)
    # No pointer leads to it; routers hear soon that they have to ask the agent.
    ended = f"/v1/conversations/{session}"
    eventually(lambda: chat.http.delete(ended).json().get("deferred") == 1, within_s=10)
    refusals = set()
    used = owner.used()
    while refusal := owner.refusal(kept):
        refusals.add(refusal)
        assert refusals <= {"LEASE_INVALID", "CONNECTOR_AWAY", "SET_FENCED"}
        # What was seen before a refusal was seen behind the fence.
        assert used == kept.block_count + unwanted.block_count
        used = owner.used()
    assert "SET_FENCED" in refusals

    eventually(lambda: [(one.set_id, one.state) for one in owner.sets()] == [(kept.set_id, HELD)], within_s=SOON_S)
    eventually(lambda: owner.used() == kept.block_count, within_s=SOON_S)
    eventually(lambda: owner.pointers(kept) > 0, within_s=LEASE_TTL_S + CLAIM_TTL_S)
    reply = chat.send(messages)
    assert (reply.route, reply.text) == ("warm", chat.cold(messages))
