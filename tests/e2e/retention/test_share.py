"""Finished turns get what is left over: never more than their share, and nothing that running requests need."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from backhaul.agent.v1 import agent_pb2
from backhaul_local.engines import BLOCK_SIZE
from tests.e2e.retention.conftest import BLOCKS, RETAINED_SHARE, SEQUENCES, SOON_S, Foreign
from tests.e2e.retention.owner import Owner
from tests.e2e.stack.chat import REPLY_TOKENS, Chat, opening
from tests.e2e.stack.conftest import conversation, eventually

pytestmark = pytest.mark.timeout(180)

SHARE = int(BLOCKS * RETAINED_SHARE)
TOKENS = 300
"""Of each answer of a burst: long enough that all run at the same time."""


def test_finished_turns_hold_no_more_than_their_share_and_nobody_elses_blocks_are_freed_for_them(
    chat: Chat, owner: Owner, foreign: Foreign
) -> None:
    retained: list[int] = []
    while sum(retained) <= 2 * SHARE:
        messages, _ = conversation(chat)
        foreign.keep()

        eventually(lambda: owner.used() <= SHARE + foreign.block_count, within_s=SOON_S)

        sets = owner.sets()
        assert owner.used() == sum(held.block_count for held in sets) + foreign.block_count
        retained.append(max(held.block_count for held in sets))

    assert owner.used() - foreign.block_count > SHARE - 2 * max(retained)
    # The newest is worth most: nobody has come back so far.
    second = chat.send(messages)
    assert (second.route, second.text) == ("warm", chat.cold(messages))


def test_a_burst_of_requests_is_not_held_up_by_retained_blocks(chat: Chat, owner: Owner) -> None:
    sets: list[agent_pb2.BlockSet] = []
    while owner.used() <= SHARE * 2 // 3:
        conversation(chat)
        sets.append(owner.new_set(sets))
    # As many as run at once, and so long that they need half of the blocks that are retained.
    each = (BLOCKS - owner.used() // 2) // SEQUENCES * BLOCK_SIZE - TOKENS
    words = 300 * each // (sets[0].token_count - REPLY_TOKENS)
    preempted = owner.engine.metric("vllm:num_preemptions_total")
    running: list[float] = []

    with ThreadPoolExecutor(SEQUENCES) as pool:
        replies = [pool.submit(chat.send, opening(words), tokens=TOKENS) for _ in range(SEQUENCES)]
        while not all(reply.done() for reply in replies):
            running.append(owner.engine.metric("vllm:num_requests_running"))
            time.sleep(0.02)

    assert [reply.result().status for reply in replies] == [200] * SEQUENCES
    assert max(running) == SEQUENCES
    assert owner.engine.metric("vllm:num_preemptions_total") == preempted
    eventually(lambda: owner.engine.metric("vllm:num_requests_waiting") == 0, within_s=SOON_S)
    eventually(lambda: owner.used() <= SHARE, within_s=SOON_S)
