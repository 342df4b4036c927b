"""A decode engine: what it retains, it reports; what nobody can come back for, it frees."""

import time

import pytest

from backhaul_connector.wire import (
    PROTOCOL_VERSION,
    Claimed,
    Deadlines,
    Freed,
    Hello,
    Pong,
    Replayed,
    Retained,
    Returned,
)
from backhaul_local.engines import MODEL_NAME
from tests.engine_fixtures import BLOCKS
from tests.fakes.engine_pair import COLD, SCOPE, Engine, Pair, answer_of_late_read

pytestmark = pytest.mark.timeout(120)


def test_a_connector_says_who_it_is_and_what_its_engine_can_do(pair: Pair) -> None:
    hello = pair.decode.agent.wait(Hello)
    peer = pair.decode.shake_hands()

    assert (hello.protocol, hello.rank, hello.problem) == (PROTOCOL_VERSION, 0, "")
    assert hello.engine_id == peer.metadata["engine_id"]
    assert (hello.block_size, hello.block_count) == (32, BLOCKS)
    assert (hello.tp_size, hello.recompute_threshold) == (1, 1)
    assert hello.kv_head_count > 0
    assert (hello.ttl_s, hello.lease_s) == (pair.decode.ttl_s, pair.decode.lease_s)
    assert hello.vllm_version.partition("+")[0] == "0.32.0"
    assert 0 < peer.clock - hello.now < 3600
    assert pair.decode.weights_digest() == pair.prefill.weights_digest() != ""


def test_no_reply_of_a_labelled_turn_carries_a_handle(pair: Pair) -> None:
    turn = pair.turn(pair.tokens(200))
    assert turn.second.body.get("kv_transfer_params") is None

    first = pair.prefill.complete(turn.prompt, None, 1)
    assert first.status == 200
    body = {"model": MODEL_NAME, "prompt": pair.tokens(200), "max_tokens": 20, "stream": True}
    labelled = {**body, "kv_transfer_params": pair.label({}, ["key"])}
    with pair.decode.http.stream("POST", "/v1/completions", json=labelled) as answer:
        text = "".join(answer.iter_text())
    assert "data:" in text
    assert "kv_transfer_params" not in text


def test_a_turn_without_keys_is_freed_at_once(pair: Pair) -> None:
    pair.turn(pair.tokens(300), keys=())

    pair.decode.eventually_free()


def test_a_label_that_cannot_be_read_retains_nothing(pair: Pair) -> None:
    leg = pair.decode.complete(pair.tokens(300), {"backhaul": {"scope": 1, "keys": "x"}}, 20)

    assert leg.status == 200
    pair.decode.eventually_free()


def test_a_turn_that_ends_by_a_stop_string_retains_nothing(pair: Pair) -> None:
    prompt = pair.tokens(300)
    text = pair.decode.complete(prompt, None, 30).body["choices"][0]["text"]
    seen = len(pair.decode.agent.messages)

    leg = pair.decode.complete(prompt, pair.label({}, ["key"]), 30, stop=[text.split()[5]], ignore_eos=True)

    assert leg.body["choices"][0]["finish_reason"] == "stop"
    pair.decode.eventually_free()
    assert not any(isinstance(message, Retained) for message in pair.decode.agent.messages[seen:])


def test_a_hand_off_whose_lease_is_over_fails_the_turn_and_caches_nothing(pair: Pair) -> None:
    """vLLM's own prefill engine names no end, and whoever reads late gets the blocks of other requests."""
    prompt = pair.tokens(700)
    right = pair.alone(prompt)
    params = pair.prefill.complete(prompt, COLD, 1).params
    told = params["remote_blocks_expiry_time"]
    assert 0 < told - pair.prefill.clock() <= pair.prefill.lease_s
    pair.prefill.eventually_free(timeout_s=pair.prefill.lease_s + 5)
    assert pair.prefill.clock() >= told
    pair.prefill.complete(pair.tokens(3000), None, 1)

    late = pair.decode.complete(prompt, pair.label(params, ["key"]), 60)

    assert late.status == 500
    pair.decode.eventually_free()
    assert pair.turn(prompt, keys=()).second.tokens == right


def test_a_hand_off_whose_read_ends_after_its_lease_fails_the_turn_and_caches_nothing(pair: Pair) -> None:
    pair.turn(pair.tokens(100), keys=())
    prompt = pair.tokens(700)
    right = pair.alone(prompt)
    params = pair.prefill.complete(prompt, COLD, 1).params
    soon = {**pair.label(params, ["key"]), "remote_blocks_expiry_time": pair.prefill.clock() + 7.0}

    late = answer_of_late_read(lambda: pair.decode.complete(prompt, soon, 60), pair.prefill)

    assert late.status == 500
    pair.decode.eventually_free()
    assert pair.turn(prompt, keys=()).second.tokens == right


def test_a_set_that_is_read_is_reported_as_freed(pair: Pair) -> None:
    before = pair.turn(pair.tokens(300))
    assert before.report is not None
    set_id = before.report.set_id

    pair.turn([*before.history, *pair.tokens(40)], before.handle, keys=())

    assert pair.decode.agent.wait(Freed, where=lambda freed: set_id in freed.set_ids)


def test_a_turn_of_the_decode_engine_alone_is_tracked_and_expires(pair: Pair) -> None:
    """Without tracking its blocks would stay pinned until the engine restarts."""
    seen = len(pair.decode.agent.messages)
    leg = pair.decode.complete(pair.tokens(300), pair.label({}, ["key"]), 30)
    assert leg.status == 200
    set_id = pair.decode.agent.wait(Retained, after=seen).set.set_id

    pair.decode.agent.wait(
        Freed, after=seen, timeout_s=pair.decode.ttl_s + 10, where=lambda freed: set_id in freed.set_ids
    )

    pair.decode.eventually_free()


def test_a_turn_of_the_decode_engine_alone_can_be_released(pair: Pair) -> None:
    seen = len(pair.decode.agent.messages)
    pair.decode.complete(pair.tokens(300), pair.label({}, ["key"]), 30)
    set_id = pair.decode.agent.wait(Retained, after=seen).set.set_id

    pair.decode.nixl.release(set_id)

    pair.decode.agent.wait(Freed, after=seen, timeout_s=2, where=lambda freed: set_id in freed.set_ids)
    pair.decode.eventually_free()


def _foreign_count(engine: Engine, pair: Pair) -> int:
    """Returns how many leases an engine tells to be foreign, once it has done something: else it tells nothing new."""
    engine.complete(pair.tokens(20), None, 30)
    return engine.agent.wait(Pong, after=len(engine.agent.messages)).foreign_count


def test_a_hand_off_is_a_lease_that_is_told_to_be_foreign(pair: Pair) -> None:
    prefill = pair.prefill
    hand_off = prefill.complete(pair.tokens(300), COLD, 1).params["remote_request_id"]
    assert _foreign_count(prefill, pair) == 1
    prefill.nixl.release(hand_off)
    deadline = time.monotonic() + 10
    while _foreign_count(prefill, pair):
        assert time.monotonic() < deadline, "the lease of a hand-off that was released is told"


def test_a_renewal_is_confirmed_by_the_engine_with_its_new_deadline(pair: Pair) -> None:
    turn = pair.turn(pair.tokens(200))
    assert turn.report is not None
    set_id = turn.report.set_id
    # The engine only ever lengthens: wait until two thirds of its lease reach further than what is left.
    extension_s = pair.decode.lease_s * 2 / 3
    time.sleep(max(0.0, pair.decode.ttl_s - extension_s) + 1)
    seen = len(pair.decode.agent.messages)

    pair.decode.nixl.renew(set_id)

    confirmed = pair.decode.agent.wait(Deadlines, after=seen, timeout_s=2).deadlines[set_id]
    assert turn.report.deadline < confirmed <= pair.decode.clock() + extension_s


def test_a_new_session_starts_with_a_replay_that_knows_what_was_claimed(pair: Pair) -> None:
    turns = [pair.turn(pair.tokens(200), keys=(f"key{index}",)) for index in range(3)]
    sets = [turn.report.set_id for turn in turns if turn.report is not None]
    for message in (Claimed(set_id=sets[0]), Claimed(set_id=sets[1]), Returned(set_id=sets[1])):
        pair.decode.agent.send(message)
    # The agent dies right after it wrote: what it wrote counts all the same.
    pair.decode.agent.vanish()
    seen = len(pair.decode.agent.messages)

    pair.decode.agent.listen()

    hello = pair.decode.agent.wait(Hello, after=seen)
    replayed = pair.decode.agent.wait(Replayed, after=seen)
    reports = [message for message in pair.decode.agent.messages[seen:] if isinstance(message, Retained)]
    assert hello.last_session == "peer"
    assert replayed.set_count == len(reports)
    assert all(report.replayed for report in reports)
    claimed = {report.set.set_id: report.set.claimed for report in reports}
    assert [claimed[set_id] for set_id in sets] == [True, False, False]
    assert {report.set.scope for report in reports} == {SCOPE}


def test_without_an_agent_every_output_is_the_same(pair: Pair) -> None:
    prompt = pair.tokens(300)
    right = pair.alone(prompt)
    pair.decode.agent.vanish()
    pair.prefill.agent.vanish()
    try:
        first = pair.prefill.complete(prompt, None, 1)
        leg = pair.decode.complete(prompt, pair.label({}, ["key"]), 60)
        assert (first.status, leg.status) == (200, 200)
        assert leg.tokens == right
    finally:
        seen = len(pair.decode.agent.messages)
        pair.decode.agent.listen()
        pair.prefill.agent.listen()
    # What was retained meanwhile comes with the replay.
    assert pair.decode.agent.wait(Retained, after=seen).replayed
