"""A decode engine says how full it is, so that what it retains can get out of the way of what runs."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from backhaul_connector.wire import Memory, Retained
from tests.engine_fixtures import BLOCKS
from tests.fakes.engine_pair import COLD, Pair

pytestmark = pytest.mark.timeout(120)

LONG = 2_200
"""Tokens of a prompt of which two are too many for the engine: 69 blocks."""


def test_what_a_turn_retains_is_free_no_more_and_nobody_waits(pair: Pair) -> None:
    seen = len(pair.decode.agent.messages)
    turn = pair.turn(pair.tokens(300))
    assert turn.report is not None

    # Block 0 is vLLM's own.
    free = BLOCKS - 1 - turn.report.block_count
    pair.decode.agent.wait(Memory, after=seen, where=lambda memory: memory == Memory(free_count=free, waiting_count=0))


def test_a_request_without_blocks_is_seen_to_wait_until_it_has_them(pair: Pair) -> None:
    pair.turn(pair.tokens(300))
    seen = len(pair.decode.agent.messages)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(pair.decode.complete, pair.tokens(LONG), None, 120, ignore_eos=True) for _ in range(2)]
        waiting = pair.decode.agent.wait(
            Memory, after=seen, where=lambda memory: memory.waiting_count > 0, timeout_s=60
        )
        assert [one.result().status for one in both] == [200, 200]

    assert waiting.waiting_count >= -(-LONG // 32)
    after = pair.decode.agent.messages.index(waiting, seen)
    pair.decode.agent.wait(Memory, after=after, where=lambda memory: memory.waiting_count == 0)


def test_a_turn_that_ends_while_another_waits_for_blocks_retains_none_for_it_to_wait_on(pair: Pair) -> None:
    seen = len(pair.decode.agent.messages)
    with ThreadPoolExecutor(2) as threads:
        both = [
            threads.submit(pair.decode.complete, pair.tokens(LONG), pair.label({}, [f"key-{number}"]), 120)
            for number in range(2)
        ]
        assert [one.result().status for one in both] == [200, 200]

    last = pair.decode.agent.wait(Retained, after=seen)
    pair.decode.agent.wait(Memory, after=seen, where=lambda memory: memory.waiting_count == 0)
    reported = [message for message in pair.decode.agent.messages[seen:] if isinstance(message, Retained)]
    assert reported == [last]


def test_a_turn_reports_which_one_it_continues_and_how_long_it_took(pair: Pair) -> None:
    prompt = pair.tokens(300)
    first = pair.prefill.complete(prompt, COLD, 1)
    params = pair.label(first.params, ["key"])
    params["backhaul"]["continues"] = ["before", "long-before"]
    seen = len(pair.decode.agent.messages)
    before = pair.decode.clock()
    pair.decode.complete(prompt, params, 40)
    after = pair.decode.clock()

    report = pair.decode.agent.wait(Retained, after=seen).set

    assert report.continues == ["before", "long-before"]
    assert 0 < report.turn_s <= report.ended_at - before
    assert before < report.ended_at < after
