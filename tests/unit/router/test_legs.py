"""What each engine is sent, and what is read of its reply."""

import json
from typing import Any

import msgspec
import pytest

from backhaul_connector.wire import TurnLabel
from backhaul_router.core.body import TurnBody
from backhaul_router.core.clean_lines import CleanLines, without_params
from backhaul_router.core.legs import (
    decode_body,
    hand_off,
    prefill_body,
    prompt_tokens_in,
    token_prefill_body,
    tokenize_body,
)
from backhaul_router.core.usage import PromptUsage
from tests.unit.router.bodies import chat, completion

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def prefill(body: TurnBody, **options: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(prefill_body(body, **{"handle": None, "cache_salt": "", **options}))
    return document


def decode(body: TurnBody, **options: Any) -> dict[str, Any]:
    defaults = {"params": None, "scope": "sc", "keys": ["k"], "cache_salt": ""}
    document: dict[str, Any] = json.loads(decode_body(body, **{**defaults, **options}))
    return document


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream_interval": 4},
        {"min_tokens": 100, "max_tokens": 500},
        {"thinking_token_budget": 50},
        {"length_penalty": 2.0},
        {"repetition_detection": {"max_pattern_size": 3}},
        {"stop": ["\n"], "include_stop_str_in_output": True},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_json": {}},
        {"logprobs": True, "top_logprobs": 3},
        {"return_token_ids": True},
        {"n": 1, "best_of": 1},
        {"request_id": "mine"},
        {"session_id": "mine"},
        {"kv_transfer_params": {"remote_host": "169.254.169.254"}},
        {"ec_transfer_params": {"x": 1}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_prefill_leg_leaves_it_out(fields: dict[str, Any]) -> None:
    sent = prefill(chat(**fields))
    assert not set(fields) - {"max_tokens", "kv_transfer_params"} & set(sent)
    assert "169.254.169.254" not in str(sent)


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 9, "max_completion_tokens": 8}]
)
def test_prefill_generates_one_token_and_decode_what_the_client_asked(fields: dict[str, Any]) -> None:
    sent = prefill(chat(**fields))
    assert (sent["max_tokens"], sent["max_completion_tokens"]) == (1, 1)
    received = decode(chat(**fields))
    assert {name: received[name] for name in received if name.startswith("max")} == fields


def test_a_completion_has_one_limit() -> None:
    sent = prefill(completion(max_tokens=9, max_completion_tokens=9))
    assert sent["max_tokens"] == 1
    assert "max_completion_tokens" not in sent


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_tool_is_not_forced_on_prefill_but_stays_in_the_prompt(choice: Any) -> None:
    sent = prefill(chat(tools=TOOLS, tool_choice=choice))
    assert sent["tools"] == TOOLS
    assert sent["tool_choice"] is None


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_free_tool_choice_stays(choice: str) -> None:
    assert prefill(chat(tools=TOOLS, tool_choice=choice))["tool_choice"] == choice


def test_constraints_stay_for_models_that_see_them_in_the_prompt() -> None:
    fields = {
        "model": "moonshotai/Kimi-K3",
        "tools": TOOLS,
        "tool_choice": "required",
        "response_format": {"type": "x"},
    }
    sent = prefill(chat(**fields), keep_constraints=("kimi-k3",))
    assert sent["tool_choice"] == "required"
    assert sent["response_format"] == {"type": "x"}


@pytest.mark.parametrize(
    "name", ["chat_template", "chat_template_kwargs", "documents", "add_generation_prompt", "reasoning_effort", "seed"]
)
def test_what_shapes_the_prompt_stays_on_prefill(name: str) -> None:
    values: dict[str, Any] = {
        "chat_template": "x",
        "chat_template_kwargs": {"a": 1},
        "documents": [],
        "add_generation_prompt": False,
        "reasoning_effort": "low",
        "seed": 1,
    }
    assert prefill(chat(**{name: values[name]}))[name] == values[name]


def test_a_cold_leg_asks_for_a_hand_off_and_a_warm_one_carries_the_handle_as_it_is() -> None:
    cold = prefill(chat())["kv_transfer_params"]
    assert cold == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    handle = '{"remote_blocks_expiry_time": 12.000000000000001, "backhaul": {"token_count": 5}}'
    assert handle.encode() in prefill_body(chat(), handle=handle, cache_salt="")


def test_decode_gets_the_request_as_the_client_wrote_it() -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    fields = {"messages": [{"role": "user", "content": content}], "stream": True, "min_tokens": 3, "stop": ["x"]}
    assert decode(chat(**fields)) == {"model": "tiny", **fields}


def test_decode_gets_the_params_of_this_turn_and_the_label() -> None:
    params = {"remote_host": msgspec.Raw(b'"192.0.2.7"'), "remote_block_ids": msgspec.Raw(b"[[1, 2]]")}
    sent = decode(chat(kv_transfer_params={"remote_host": "evil"}), params=params)["kv_transfer_params"]
    assert sent.pop("backhaul") == {"scope": "sc", "keys": ["k"]}
    assert sent == {"remote_host": "192.0.2.7", "remote_block_ids": [[1, 2]]}


def test_the_label_is_what_the_connector_reads() -> None:
    raw = decode_body(chat(), params={"a": msgspec.Raw(b"1")}, scope="sc", keys=(), cache_salt="")
    label = msgspec.convert(json.loads(raw)["kv_transfer_params"]["backhaul"], TurnLabel)
    assert label == TurnLabel(scope="sc", keys=[])


def test_the_label_names_the_best_of_the_keys_by_which_the_turn_before_was_looked_up() -> None:
    find = [f"k{index}" for index in range(6)]

    sent = decode(chat(), params={"a": msgspec.Raw(b"1")}, continues=find)["kv_transfer_params"]

    assert sent["backhaul"] == {"scope": "sc", "keys": ["k"], "continues": find[:4]}
    assert msgspec.convert(sent["backhaul"], TurnLabel).continues == find[:4]


def test_an_engine_that_is_to_repeat_the_label_gets_it_in_place_of_the_clients_session() -> None:
    body = chat(session_id="mine")
    assert decode(body) == decode(chat())
    labelled = decode(body, keys=["k", "l"], labelled=True)
    assert labelled.pop("session_id") == "backhaul:sc:k:l"
    assert labelled == decode(chat())
    assert decode(body, keys=[], labelled=True) == decode(chat())


def test_a_prompt_sent_as_tokens_has_what_prefill_needs_and_nothing_else() -> None:
    fields = {"stream": True, "max_completion_tokens": 9, "stop": ["x"], "tools": TOOLS, "vllm_xargs": {"a": 1}}
    handle = '{"remote_blocks_expiry_time": 12.000000000000001}'
    sent = token_prefill_body(chat(priority=2, **fields), [1, 2], handle=handle, cache_salt="s")
    assert handle.encode() in sent
    expected = {"model": "tiny", "priority": 2, "prompt": [1, 2], "max_tokens": 1, "cache_salt": "s"}
    assert json.loads(sent) == {**expected, "kv_transfer_params": json.loads(handle)}


def test_without_a_hand_off_decode_gets_no_params_at_all() -> None:
    assert "kv_transfer_params" not in decode(chat(kv_transfer_params={"a": 1}))


def test_params_cannot_be_smuggled_in_as_extra_arguments() -> None:
    body = chat(vllm_xargs={"kv_transfer_params": "x", "session_id": "backhaul:sc:k", "mine": 1})
    assert prefill(body)["vllm_xargs"] == decode(body)["vllm_xargs"] == {"mine": 1}


def test_both_legs_carry_the_salt_and_without_one_of_ours_the_clients() -> None:
    body = chat(cache_salt="client")
    assert prefill(body, cache_salt="ours")["cache_salt"] == decode(body, cache_salt="ours")["cache_salt"] == "ours"
    assert prefill(body, cache_salt="client")["cache_salt"] == "client"
    assert "cache_salt" not in decode(chat())


REPLY = {
    "usage": {"prompt_tokens": 100},
    "choices": [{"finish_reason": "length"}],
    "kv_transfer_params": {"remote_block_ids": [[1]], "backhaul": {"prompt": 100, "local": 16, "read": 64}},
}


def test_a_reply_gives_params_and_verdict() -> None:
    hand = hand_off(json.dumps(REPLY).encode())
    assert hand.params is not None
    assert set(hand.params) == {"remote_block_ids"}
    assert hand.verdict is not None
    assert (hand.verdict.prompt, hand.verdict.local, hand.verdict.read) == (100, 16, 64)
    assert hand.usage == PromptUsage(100, b'{"cached_tokens":80}')
    assert not hand.failed


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": 7}',
        b'{"kv_transfer_params": {"backhaul": {"prompt": 1, "local": 0, "read": 0}}}',
    ],
)
def test_an_odd_reply_is_no_hand_off(reply: bytes) -> None:
    assert hand_off(reply).params is None


def test_an_odd_verdict_is_none() -> None:
    hand = hand_off(b'{"kv_transfer_params": {"a": 1, "backhaul": {"prompt": "many"}}, "usage": {"prompt_tokens": 5}}')
    assert hand.params is not None
    assert hand.verdict is None
    assert hand.usage == PromptUsage(5, b"null")


def test_the_prefill_engines_own_count_of_cached_tokens_comes_first() -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 16}}
    hand = hand_off(json.dumps({**REPLY, "usage": usage}).encode())
    assert hand.usage == PromptUsage(100, b'{"cached_tokens": 16}')


@pytest.mark.parametrize("count", [-1, 2**31, 2**70])
def test_counts_that_cannot_be_are_not_believed_and_the_hand_off_stands(count: int) -> None:
    verdict = {"prompt": 100, "local": 16, "read": 64}
    for name in verdict:
        params = {"remote_engine_id": "e", "remote_request_id": "r", "backhaul": {**verdict, name: count}}
        hand = hand_off(json.dumps({"kv_transfer_params": params, "usage": {"prompt_tokens": 5}}).encode())
        assert (hand.verdict, hand.usage, hand.name) == (None, PromptUsage(5, b"null"), ("e", "r"))
    hand = hand_off(json.dumps({"kv_transfer_params": {"a": 1}, "usage": {"prompt_tokens": count}}).encode())
    assert (hand.usage, hand.params is None) == (None, False)


def test_a_200_that_says_error_is_a_failure() -> None:
    assert hand_off(b'{"choices": [{"finish_reason": "error"}]}').failed


@pytest.mark.parametrize("value", [b"null", b'{"remote_host": "10.0.0.1"}'])
def test_replies_lose_their_params_and_nothing_else(value: bytes) -> None:
    reply = b'{"z": 1.10, "kv_transfer_params": ' + value + b', "a": {"k":  [ ]}}'
    assert without_params(reply) == b'{"z":1.10,"a":{"k":  [ ]}}'


def test_a_reply_without_params_is_not_touched() -> None:
    assert without_params(b'{ "a" : 1 }') == b'{ "a" : 1 }'
    text = b'{ "content": "kv_transfer_params" }'
    assert without_params(text) == text


def test_a_reply_that_cannot_be_read_is_not_passed_on() -> None:
    with pytest.raises(ValueError, match="JSON"):
        without_params(b'"kv_transfer_params"')


def test_tokenizing_takes_what_shapes_the_prompt() -> None:
    body = chat(tools=TOOLS, temperature=0, documents=[{"text": "x"}], reasoning_effort="low")
    sent = json.loads(tokenize_body(body))
    assert set(sent) == {"model", "messages", "tools", "chat_template_kwargs"}
    assert sent["chat_template_kwargs"] == {
        "documents": [{"text": "x"}],
        "reasoning_effort": "low",
        "enable_thinking": True,
    }


def test_a_template_may_tell_an_empty_list_from_none() -> None:
    assert json.loads(tokenize_body(chat(documents=[])))["chat_template_kwargs"] == {"documents": []}
    assert "chat_template_kwargs" not in json.loads(tokenize_body(chat(documents=None)))


def test_tokenizing_takes_the_prompt_that_the_endpoint_takes() -> None:
    assert set(json.loads(tokenize_body(chat(prompt="other")))) == {"model", "messages"}
    assert set(json.loads(tokenize_body(completion("a", messages=[{"role": "user"}])))) == {"model", "prompt"}


def test_token_ids_need_no_tokenizing() -> None:
    assert prompt_tokens_in(completion([1, 2])) == [1, 2]
    assert prompt_tokens_in(completion("a")) is None
    assert prompt_tokens_in(chat()) is None


PARAMS = b'"kv_transfer_params":{"remote_host":"10.0.0.9","remote_block_ids":[[1]]}'


@pytest.mark.parametrize("size", [1, 7, 30, 1000])
def test_an_event_is_passed_on_without_handles(size: int) -> None:
    stream = (
        b'data: {"a":1,' + PARAMS + b',"b":2}\r\n\r\ndata: {"content":"kv_transfer_params\\": 5"}\n\ndata: [DONE]\n\n'
    )
    lines = CleanLines()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    passed = b"".join(map(lines.feed, pieces)) + lines.rest()
    assert passed == stream.replace(PARAMS + b",", b"")
    assert lines.done


@pytest.mark.parametrize("before", [b'data: {"choices":[{', b'data: {"long":"' + b"x" * 100_000 + b'",', b"data: {{"])
def test_handles_that_cannot_be_taken_out_are_not_passed_on(before: bytes) -> None:
    lines = CleanLines()
    stream = before + PARAMS + b"}]}\n\n"
    pieces = [stream[start : start + 90] for start in range(0, len(stream), 90)]
    passed: list[bytes] = []
    with pytest.raises(ValueError, match="cannot be taken out"):
        passed.extend(map(lines.feed, pieces))
    assert b"10.0.0.9" not in b"".join(passed)


@pytest.mark.parametrize(
    ("stream", "done"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (b"data: {}\r\n\r\ndata: [DONE]\r\n\r\n", True),
        (b"data:[DONE]", True),
        (b"data: {}\n\ndata: [DO", False),
        (b"data: {}\n\n", False),
        (b'data: {"text":"data: [DONE]\n\n', False),
        (b"", False),
    ],
)
def test_a_stream_is_over_when_it_says_so(stream: bytes, done: bool) -> None:
    lines = CleanLines()
    lines.feed(stream)
    lines.rest()
    assert lines.done == done
