"""A prefill engine with a handle: it reads what was proved equal, and nothing else."""

import threading
import time

import pytest

from backhaul_connector.wire import PARAMS_KEY
from tests.fakes.engine_pair import COLD, Pair, answer_of_late_read, forged

pytestmark = pytest.mark.timeout(180)


def _expect_cold_texts_from_now_on(pair: Pair, prompt: list[int]) -> None:
    """A poisoned cache would give the wrong text without any handle, too."""
    assert pair.turn(prompt, keys=()).second.tokens == pair.alone(prompt)


def test_an_unedited_history_is_read_back_up_to_its_last_retained_token(pair: Pair) -> None:
    before = pair.turn(pair.tokens(700))
    prompt = [*before.history, *pair.tokens(40)]
    external = pair.prefill.metric('vllm:prompt_tokens_by_source_total{source="external_kv_transfer"')

    after = pair.turn(prompt, before.handle)

    retained = len(before.history) - 1
    assert before.report is not None
    assert before.report.token_count == retained
    assert after.first.verdict["verified"] == retained
    assert after.first.verdict["local"] + after.first.verdict["read"] == retained
    assert after.first.verdict["spent"]
    metric = pair.prefill.metric('vllm:prompt_tokens_by_source_total{source="external_kv_transfer"') - external
    assert after.first.verdict["read"] == metric > 0
    assert after.second.tokens == pair.alone(prompt)


def test_a_history_read_into_an_empty_cache_comes_wholly_from_the_decode_engine(pair: Pair) -> None:
    before = pair.turn(pair.tokens(700))
    assert pair.prefill.forget()
    prompt = [*before.history, *pair.tokens(40)]

    after = pair.turn(prompt, before.handle)

    assert (after.first.verdict["local"], after.first.verdict["read"]) == (0, len(before.history) - 1)
    assert after.second.tokens == pair.alone(prompt)


@pytest.mark.parametrize("position", [70, 300, 690, 720])
def test_reuse_stops_at_an_edit_and_leaves_no_wrong_blocks_behind(pair: Pair, position: int) -> None:
    before = pair.turn(pair.tokens(700))
    assert pair.prefill.forget()
    prompt = [*before.history, *pair.tokens(40)]
    prompt[position] = pair.tokens(1)[0] if prompt[position] != (new := pair.tokens(1)[0]) else new + 1

    after = pair.turn(prompt, before.handle)

    assert after.first.verdict["read"] == position // 64 * 64
    assert after.second.tokens == pair.alone(prompt)
    _expect_cold_texts_from_now_on(pair, prompt)


def test_a_history_cut_short_is_read_up_to_the_cut(pair: Pair) -> None:
    before = pair.turn(pair.tokens(700))
    assert pair.prefill.forget()
    prompt = before.history[:333]

    after = pair.turn(prompt, before.handle)

    assert after.first.verdict["read"] == 320
    assert after.second.tokens == pair.alone(prompt)
    _expect_cold_texts_from_now_on(pair, prompt)


def test_a_handle_for_another_conversation_is_dropped_unread_and_stays_usable(pair: Pair) -> None:
    before = pair.turn(pair.tokens(700))
    title = pair.tokens(300)

    other = pair.turn(title, before.handle, keys=())

    assert other.first.verdict["refused"] == "too_short"
    assert not other.first.verdict["spent"]
    assert other.second.tokens == pair.alone(title)
    prompt = [*before.history, *pair.tokens(40)]
    assert pair.turn(prompt, before.handle).first.verdict["verified"] == len(before.history) - 1


def test_without_the_proof_the_text_would_be_wrong_and_the_cache_poisoned(pair: Pair) -> None:
    """The control: a proof that lies lets vLLM read what it always reads, and shows what the proof is for."""
    weights = pair.prefill.weights_digest()
    before = pair.turn(pair.tokens(700))
    assert pair.prefill.forget()
    prompt = [*before.history, *pair.tokens(40)]
    prompt[100:400] = pair.tokens(300)
    right = pair.alone(prompt)

    wrong = pair.turn(prompt, forged(before.handle, prompt, weights), keys=())

    assert wrong.first.verdict["read"] == len(before.history) - 1
    assert wrong.second.tokens != right
    assert pair.turn(prompt, keys=()).second.tokens != right


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({PARAMS_KEY: None}, "unproved", id="no proof"),
        pytest.param({PARAMS_KEY: {"anchors": 7}}, "unproved", id="a proof that cannot be read"),
        pytest.param({"remote_blocks_expiry_time": None}, "no_deadline", id="no deadline"),
        pytest.param({"remote_blocks_expiry_time": True}, "malformed", id="a deadline that is no number"),
    ],
)
def test_a_handle_that_cannot_be_trusted_is_refused(pair: Pair, change: dict[str, object], reason: str) -> None:
    before = pair.turn(pair.tokens(300))
    prompt = [*before.history, *pair.tokens(40)]

    after = pair.turn(prompt, {**before.handle, **change}, keys=())

    assert after.first.verdict["refused"] == reason
    assert (after.first.verdict["read"], after.first.verdict["spent"]) == (0, False)
    assert after.second.tokens == pair.alone(prompt)


def test_a_handle_of_another_salt_is_refused(pair: Pair) -> None:
    before = pair.turn(pair.tokens(300), cache_salt="one")
    prompt = [*before.history, *pair.tokens(40)]

    after = pair.turn(prompt, before.handle, keys=(), cache_salt="two")

    assert after.first.verdict["refused"] == "identity"
    assert after.first.verdict["local"] == 0
    assert after.second.tokens == pair.alone(prompt)


def test_a_handle_whose_deadline_has_passed_is_refused(pair: Pair) -> None:
    known = pair.turn(pair.tokens(300))
    pair.turn([*known.history, *pair.tokens(10)], known.handle, keys=())
    before = pair.turn(pair.tokens(300))
    prompt = [*before.history, *pair.tokens(40)]
    deadline = before.handle["remote_blocks_expiry_time"]

    after = pair.turn(prompt, {**before.handle, "remote_blocks_expiry_time": deadline - 60}, keys=())

    assert after.first.verdict["refused"] == "expired"
    assert not after.first.verdict["spent"]
    assert after.second.tokens == pair.alone(prompt)


def test_a_handle_is_used_once(pair: Pair) -> None:
    before = pair.turn(pair.tokens(300))
    prompt = [*before.history, *pair.tokens(40)]
    pair.turn(prompt, before.handle, keys=())

    again = pair.turn(prompt, before.handle, keys=())

    assert again.first.verdict["refused"] == "used"
    # The first use may still be reading: the router must not return the claim.
    assert again.first.verdict["spent"]
    assert again.second.tokens == pair.alone(prompt)


def test_a_read_that_ends_after_its_deadline_fails_the_leg_and_caches_nothing(pair: Pair) -> None:
    known = pair.turn(pair.tokens(300))
    pair.turn([*known.history, *pair.tokens(10)], known.handle, keys=())
    before = pair.turn(pair.tokens(700))
    assert pair.prefill.forget()
    prompt = [*before.history, *pair.tokens(40)]
    right = pair.alone(prompt)
    handle = {**before.handle, "remote_blocks_expiry_time": pair.decode.clock() + 7.0}

    late = answer_of_late_read(lambda: pair.prefill.complete(prompt, handle, 1), pair.decode)

    assert late.status == 500
    cold = pair.prefill.complete(prompt, COLD, 1)
    assert cold.verdict["local"] == 0
    second = pair.decode.complete(prompt, pair.label(cold.params, ()), 60)
    assert second.tokens == right


def test_a_preempted_request_that_had_read_remotely_finishes_with_the_right_text(pair: Pair) -> None:
    before = pair.turn(pair.tokens(900))
    prompt = [*before.history, *pair.tokens(30)]
    rival_prompt = pair.tokens(900)
    preemptions = pair.prefill.metric("vllm:num_preemptions_total")
    # Long enough to take, after the preemption, most of the blocks whose content the other had read.
    rival = threading.Thread(target=lambda: pair.prefill.complete(rival_prompt, None, 2200))
    rival.start()
    time.sleep(0.5)

    long = pair.prefill.complete(prompt, before.handle, 1000)
    rival.join(timeout=120)

    assert long.status == 200
    assert long.verdict["read"] > 0
    assert pair.prefill.metric("vllm:num_preemptions_total") > preemptions
    assert long.tokens == pair.alone(prompt, 1000)
