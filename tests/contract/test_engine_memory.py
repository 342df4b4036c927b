"""What becomes of KV blocks on engines with vLLM's own connector: every trap that Backhaul exists for.

The engines are a parameter: simulated ones, and vLLM itself (whose connector is Backhaul's without an agent to talk to:
then it does what vLLM's own does). Nothing here is as one would wish; it is as it is, so that the simulator cannot be
kinder than vLLM. The file's last test leaves blocks that stay pinned for ever.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.engine_fixtures import REAL, TTL_S, Engines, forget, running_real, running_simulated
from tests.fakes.engine_pair import COLD, Engine, Leg, Pair

pytestmark = pytest.mark.timeout(180)

BLOCK = 32
EXTERNAL = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"'
WARM = {"do_remote_decode": True, "do_remote_prefill": False}
FAILED = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}


@pytest.fixture(scope="module", params=["simulated", REAL])
def stock_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("k")
    if request.param == "simulated":
        with running_simulated(folder, agents=False) as engines:
            yield engines
        return
    model, python = request.getfixturevalue("tiny_model"), request.getfixturevalue("engine_python")
    with running_real(folder, python, model, agents=False, ttl_s=TTL_S) as engines:
        yield engines


@pytest.fixture
def stock(stock_engines: Engines, request: pytest.FixtureRequest) -> "Stock":
    """The engines, with nothing cached or pinned by an earlier test."""
    stock = Stock(stock_engines, seed=request.node.name)
    stock.drop()
    return stock


_RETAINED: dict[Engine, list[str]] = {}
"""Ids of what tests of this module left on each engine, as far as they were told."""


class Stock:
    """Turns over both engines, whose handles come back in the decode engine's replies."""

    def __init__(self, engines: Engines, seed: str) -> None:
        self._engines = engines
        self.prefill = engines.prefill
        self.decode = engines.decode
        self._pair = Pair(engines.prefill, engines.decode, engines.vocabulary, seed)

    def tokens(self, count: int) -> list[int]:
        return self._pair.tokens(count)

    def alone(self, prompt: Sequence[int], max_tokens: int = 40) -> list[int]:
        return self._pair.alone(prompt, max_tokens)

    def turn(self, prompt: Sequence[int], max_tokens: int = 40) -> tuple[list[int], dict[str, Any]]:
        """Runs a cold turn; returns the history after it, and the handle of what the decode engine retains."""
        reply = self.decoded(prompt, self.handed_off(prompt), max_tokens)
        return [*prompt, *reply.tokens], {**reply.params, **WARM}

    def handed_off(self, prompt: Sequence[int], params: Mapping[str, Any] = COLD) -> dict[str, Any]:
        """Runs a prefill leg; returns its hand-off."""
        return self.retained_by(self.prefill, self.prefill.complete(prompt, params, 1)).params

    def decoded(self, prompt: Sequence[int], params: Mapping[str, Any], max_tokens: int = 40, **more: Any) -> Leg:
        """Runs a decode leg."""
        return self.retained_by(self.decode, self.decode.complete(prompt, params, max_tokens, **more))

    def answer(self, prompt: Sequence[int], params: Mapping[str, Any]) -> list[int]:
        """Runs both legs with a handle; returns the reply."""
        return self.decoded(prompt, self.handed_off(prompt, params)).tokens

    def drop(self) -> None:
        """Releases all that turns left on either engine, and empties both prefix caches."""
        for engine in (self.prefill, self.decode):
            for set_id in _RETAINED.pop(engine, ()):
                engine.nixl.release(set_id)
        forget(self._engines)

    def retained_by(self, engine: Engine, leg: Leg) -> Leg:
        """Notes what is to be released after the test."""
        assert leg.status == 200, leg.body
        if leg.body["kv_transfer_params"]:
            _RETAINED.setdefault(engine, []).append(leg.params["remote_request_id"])
        return leg

    def read_by(self, prompt: Sequence[int], params: Mapping[str, Any]) -> tuple[Leg, int]:
        """Sends a handle to the prefill engine alone; returns its answer, and how many tokens it read."""
        before = self.prefill.metric(EXTERNAL)
        leg = self.prefill.complete(prompt, params, 1)
        if leg.status == 200:
            self.retained_by(self.prefill, leg)
        return leg, int(self.prefill.metric(EXTERNAL) - before)


def cut(handle: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Returns a handle for the first ``tokens`` tokens, with exactly the blocks that hold them."""
    blocks = [ids[: -(-tokens // BLOCK)] for ids in handle["remote_block_ids"]]
    return {**handle, "remote_num_tokens": tokens, "remote_block_ids": blocks}


def cached_tokens(leg: Leg) -> int:
    count: int = leg.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


# What an engine keeps by itself


def test_a_prompt_that_comes_again_is_found_in_whole_blocks_but_its_last_token(stock: Stock) -> None:
    prompt = stock.tokens(8 * BLOCK)

    legs = [stock.decode.complete(prompt[:count], None, 1) for count in (250, 250, 256, 256)]

    # 250 tokens fill 7 blocks; of 256, the last token is computed again, and with it its block.
    assert [cached_tokens(leg) for leg in legs] == [0, 224, 224, 224]


def test_another_salt_finds_nothing(stock: Stock) -> None:
    prompt = stock.tokens(100)
    stock.decode.complete(prompt, None, 1, cache_salt="one")

    assert cached_tokens(stock.decode.complete(prompt, None, 1, cache_salt="one")) == 96
    assert cached_tokens(stock.decode.complete(prompt, None, 1, cache_salt="two")) == 0


def test_the_prefix_cache_is_not_emptied_while_blocks_are_retained(stock: Stock) -> None:
    _, handle = stock.turn(stock.tokens(100))

    assert not stock.decode.forget()
    stock.decode.nixl.release(handle["remote_request_id"])
    stock.decode.eventually_free()
    assert stock.decode.forget()


# What is handed from one engine to the other


def test_a_hand_off_gives_the_text_of_one_engine_alone(stock: Stock) -> None:
    prompt = stock.tokens(500)

    history, _ = stock.turn(prompt)

    assert history[500:] == stock.alone(prompt)


def test_a_hand_off_is_freed_when_it_was_read(stock: Stock) -> None:
    params = stock.handed_off(prompt := stock.tokens(300))
    assert stock.prefill.metric("vllm:kv_cache_usage_perc") > 0

    stock.decoded(prompt, params)

    stock.prefill.eventually_free()


@pytest.mark.parametrize(("left_s", "status"), [(4.0, 500), (-1.0, 500), (60.0, 200)])
def test_a_hand_off_with_a_deadline_is_read_only_until_shortly_before_it(
    stock: Stock, left_s: float, status: int
) -> None:
    """vLLM's own connector sets none; whoever sets one is heard."""
    params = stock.handed_off(prompt := stock.tokens(300))
    assert params["remote_blocks_expiry_time"] is None

    leg = stock.decode.complete(prompt, {**params, "remote_blocks_expiry_time": stock.prefill.clock() + left_s}, 40)

    assert leg.status == status
    if status == 200:
        stock.retained_by(stock.decode, leg)
        assert leg.tokens == stock.alone(prompt)


def test_a_hand_off_that_nobody_reads_is_freed_with_its_lease(stock: Stock) -> None:
    stock.handed_off(stock.tokens(300))
    time.sleep(stock.prefill.lease_s / 2)
    assert stock.prefill.metric("vllm:kv_cache_usage_perc") > 0

    stock.prefill.eventually_free(timeout_s=stock.prefill.lease_s)


def test_hand_offs_are_leases_like_any_other_and_free_when_their_id_is_released(stock: Stock) -> None:
    params = stock.handed_off(stock.tokens(300))

    stock.prefill.nixl.release(params["remote_request_id"])

    stock.prefill.eventually_free(timeout_s=stock.prefill.lease_s / 2)


def test_a_conversation_is_read_back_from_the_decode_engine(stock: Stock) -> None:
    history, handle = stock.turn(stock.tokens(500))
    prompt = [*history, *stock.tokens(40)]
    assert handle["remote_num_tokens"] == len(history) - 1
    assert stock.prefill.forget()
    before = stock.prefill.metric(EXTERNAL)

    reply = stock.answer(prompt, handle)

    assert stock.prefill.metric(EXTERNAL) - before == len(history) - 1
    assert reply == stock.alone(prompt)


@pytest.mark.parametrize("kept", [500, 333, 64])
def test_a_handle_cut_to_any_length_with_its_first_blocks_is_right(stock: Stock, kept: int) -> None:
    history, handle = stock.turn(stock.tokens(500))
    prompt = [*history[:kept], *stock.tokens(60)]
    assert stock.prefill.forget()

    assert stock.answer(prompt, cut(handle, kept)) == stock.alone(prompt)


def test_a_cut_handle_is_right_when_part_of_it_is_there_already(stock: Stock) -> None:
    history, handle = stock.turn(stock.tokens(500))
    prompt = [*history[:460], *stock.tokens(60)]
    assert stock.prefill.forget()
    stock.prefill.complete(history[:200], None, 1)

    leg, read = stock.read_by(prompt, cut(handle, 460))

    assert read == 460 - 192
    assert stock.decoded(prompt, leg.params).tokens == stock.alone(prompt)


# Nothing is compared


def test_blocks_of_another_history_are_read_and_poison_the_prefix_cache(stock: Stock) -> None:
    history, handle = stock.turn(stock.tokens(500))
    prompt = [*history, *stock.tokens(40)]
    prompt[100:300] = stock.tokens(200)
    right = stock.alone(prompt)
    assert stock.prefill.forget()

    assert stock.answer(prompt, handle) != right
    # The same prompt, without any handle.
    assert stock.answer(prompt, COLD) != right


def test_of_too_many_blocks_the_last_are_read(stock: Stock) -> None:
    """A shorter prompt with the whole handle: vLLM counts from the end."""
    history, handle = stock.turn(stock.tokens(500))
    assert stock.prefill.forget()

    assert stock.answer(history[:200], handle) != stock.alone(history[:200])


def test_a_handle_without_a_port_is_ignored(stock: Stock) -> None:
    history, handle = stock.turn(stock.tokens(300))
    prompt = [*history, *stock.tokens(40)]
    del handle["remote_port"]

    leg, read = stock.read_by(prompt, handle)

    assert (leg.status, read) == (200, 0)


# A handle is good once, and for a time


def test_blocks_are_freed_when_they_were_read(stock: Stock) -> None:
    history, handle = stock.turn(stock.tokens(300))
    assert stock.prefill.forget()

    leg, read = stock.read_by([*history, *stock.tokens(40)], handle)

    assert (leg.status, read) == (200, len(history) - 1)
    stock.decode.eventually_free()


def test_blocks_are_freed_by_a_handle_that_reads_nothing(stock: Stock) -> None:
    """All that the handle covers is in the prefill engine's own cache: it reads nothing, and notifies all the same."""
    history, handle = stock.turn(stock.tokens(300))

    leg, read = stock.read_by([*history[:100], *stock.tokens(40)], cut(handle, 64))

    assert (leg.status, read) == (200, 0)
    stock.decode.eventually_free()


def test_a_used_handle_without_its_deadline_reads_whatever_has_taken_the_blocks(stock: Stock) -> None:
    history, handle = stock.turn(stock.tokens(500))
    prompt = [*history, *stock.tokens(40)]
    right = stock.alone(prompt)
    del handle["remote_blocks_expiry_time"]
    stock.read_by(prompt, handle)
    stock.drop()
    _overwrite(stock)

    leg, read = stock.read_by(prompt, handle)

    assert (leg.status, read) == (200, len(history) - 1)
    assert stock.decoded(prompt, leg.params).tokens != right


def _overwrite(stock: Stock) -> None:
    """Has every free block of the decode engine written anew. Leaves a set there: an idle engine answers no reads."""
    stock.decode.complete(stock.tokens(2900), None, 1)
    stock.turn(stock.tokens(400))


@pytest.mark.parametrize("left_s", [4.0, -1.0])
def test_a_handle_in_its_last_seconds_or_past_them_is_a_bare_500(stock: Stock, left_s: float) -> None:
    history, handle = stock.turn(stock.tokens(300))
    assert stock.prefill.forget()
    late = {**handle, "remote_blocks_expiry_time": stock.decode.clock() + left_s}

    leg, read = stock.read_by([*history, *stock.tokens(40)], late)

    assert (leg.status, leg.body["error"], read) == (500, FAILED, 0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"remote_engine_id": "another-engine"}, id="another engine at its port"),
        pytest.param({"remote_engine_id": "another-engine", "remote_port": 1}, id="nobody at its port"),
        pytest.param({"remote_block_ids": [[10_000_000] * 11]}, id="blocks that do not exist"),
    ],
)
def test_a_read_that_cannot_be_is_a_bare_500_and_leaves_nothing_behind(stock: Stock, change: dict[str, Any]) -> None:
    history, handle = stock.turn(stock.tokens(300))
    prompt = [*history, *stock.tokens(40)]
    right = stock.alone(prompt)
    assert stock.prefill.forget()

    leg, _ = stock.read_by(prompt, {**handle, **change})

    assert (leg.status, leg.body["error"]) == (500, FAILED)
    stock.prefill.eventually_free()
    assert stock.answer(prompt, COLD) == right


def test_in_a_stream_a_failed_read_is_an_event_after_the_role(stock: Stock) -> None:
    history, handle = stock.turn(stock.tokens(300))
    assert stock.prefill.forget()
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "max_tokens": 4,
        "kv_transfer_params": {**handle, "remote_engine_id": "x", "prompt_token_ids": [*history, *stock.tokens(40)]},
    }

    lines = _lines(stock.prefill, "/v1/chat/completions", body)

    assert '"role":"assistant"' in lines[0].replace(" ", "")
    assert '"Internal server error"' in lines[1]
    assert lines[2] == "data: [DONE]"


# What is retained


def test_an_answer_that_a_stop_token_ends_is_retained_and_one_that_a_stop_string_ends_is_not(stock: Stock) -> None:
    prompt = stock.tokens(300)
    plain = stock.decode.complete(prompt, None, 20)
    word = plain.body["choices"][0]["text"].split()[4]

    by_string = stock.decoded(prompt, stock.handed_off(prompt), 20, stop=[word])
    assert by_string.body["choices"][0]["finish_reason"] == "stop"
    assert not by_string.body["kv_transfer_params"]
    stock.decode.eventually_free()

    by_token = stock.decoded(prompt, stock.handed_off(prompt), 20, stop_token_ids=[plain.tokens[4]])
    assert by_token.body["choices"][0]["finish_reason"] == "stop"
    # A step may have been under way: then its token counts, too (docs/decisions/0006).
    assert len(prompt) + len(by_token.tokens) - by_token.params["remote_num_tokens"] in (0, 1)


def test_a_stream_that_the_client_leaves_retains_nothing(stock: Stock) -> None:
    params = stock.handed_off(prompt := stock.tokens(300))
    body = {"prompt": prompt, "max_tokens": 2000, "stream": True, "ignore_eos": True, "kv_transfer_params": params}

    with stock.decode.http.stream("POST", "/v1/completions", json=body) as answer:
        assert next(answer.iter_lines())

    stock.decode.eventually_free()
    assert stock.decode.metric("vllm:num_requests_running") == 0


def test_a_stream_carries_no_handle_although_its_blocks_are_retained(stock: Stock) -> None:
    prompt = stock.tokens(300)
    body = {"prompt": prompt, "max_tokens": 5, "stream": True, "kv_transfer_params": stock.handed_off(prompt)}

    lines = _lines(stock.decode, "/v1/completions", body)

    assert lines[-1] == "data: [DONE]"
    assert "kv_transfer_params" not in "".join(lines)
    assert stock.decode.metric("vllm:kv_cache_usage_perc") > 0
    # Without a handle nobody can release it.
    stock.decode.eventually_free(timeout_s=stock.decode.ttl_s + 5)


def test_the_side_channel_tells_who_listens_and_what_time_it_is_there(stock: Stock) -> None:
    _, handle = stock.turn(stock.tokens(100))

    first, second = stock.decode.shake_hands(), stock.decode.shake_hands()

    assert set(first.payload) == {"compatibility_hash", "agent_metadata_bytes"}
    assert first.metadata["engine_id"] == handle["remote_engine_id"]
    assert first.metadata["block_size"] == BLOCK
    assert first.metadata["num_blocks"] > 100
    assert first.payload["compatibility_hash"] == stock.prefill.shake_hands().payload["compatibility_hash"]
    assert 0 < second.clock - first.clock < 10
    assert 0 < handle["remote_blocks_expiry_time"] - first.clock <= stock.decode.ttl_s


def test_what_was_retained_with_neither_flag_set_is_pinned_for_ever(stock: Stock) -> None:
    """The last test of this file: nothing but a restart frees these blocks."""
    leg = stock.decode.complete(stock.tokens(300), {"any": "thing"}, 20)
    handle = leg.params

    stock.decode.nixl.release(handle["remote_request_id"])
    time.sleep(max(0.0, handle["remote_blocks_expiry_time"] - stock.decode.clock()) + 1)

    assert stock.decode.metric("vllm:kv_cache_usage_perc") > 0


def _lines(engine: Engine, path: str, body: dict[str, Any]) -> list[str]:
    with engine.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        return [line for line in answer.iter_lines() if line]
