"""Bodies of `/v1/messages`: what is refused, the keys of their turns, the legs."""

import json
from typing import Any

import pytest

from backhaul_router.core.body import TurnBody
from backhaul_router.core.errors import ApiError
from backhaul_router.core.kinds import decode_alone, text_only
from backhaul_router.core.legs import decode_body, prefill_body
from backhaul_router.core.lookup import keys_of
from tests.unit.router.bodies import chat, message

MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def prefill(body: TurnBody, **options: Any) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(prefill_body(body, handle=None, cache_salt="", **options))
    return sent


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content"),
        ({"system": 3}, "system"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": "enabled"}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking"),
        ({"output_config": "high"}, "output_config"),
    ],
    ids=str,
)
def test_what_decode_would_refuse_after_prefills_work_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        message(**fields)
    assert (error.value.status, error.value.param) == (400, param)


# Keys


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(message("a"), message("a", "b", "c"), id="text"),
        pytest.param(message([text("a")]), message("a", "b", "c"), id="a text is short for one block"),
        pytest.param(message([text("a", **MARK)]), message([text("a")], "b", [text("c", **MARK)]), id="marks move"),
        pytest.param(message("a", tools=[{**TOOL, **MARK}]), message("a", "b", "c", tools=[TOOL]), id="marks of tools"),
        pytest.param(
            message("a", system=[text("x-anthropic-billing-header: 1"), text("be brief", **MARK)]),
            message("a", "b", "c", system=[text("x-anthropic-billing-header: 2"), text("be brief")]),
            id="who pays",
        ),
        pytest.param(message("a", system="be brief"), message("a", "b", "c", system=[text("be brief")]), id="system"),
        pytest.param(
            message([{"type": "tool_result", "tool_use_id": "t", "content": [text("3", **MARK)]}]),
            message([{"type": "tool_result", "tool_use_id": "t", "content": [text("3")]}], "b", "c"),
            id="marks in what a tool said",
        ),
    ],
)
def test_the_next_turn_looks_where_this_one_is_labelled(first: TurnBody, second: TurnBody) -> None:
    assert keys_of(second, None).find[0] == keys_of(first, None).own


@pytest.mark.parametrize("fields", [{"system": "be brief"}, {"tools": [TOOL]}, {"chat_template_kwargs": {"x": 1}}])
def test_what_else_shapes_a_prompt_is_part_of_its_keys(fields: dict[str, Any]) -> None:
    assert keys_of(message(**fields), None).own != keys_of(message(), None).own


def test_a_chat_is_not_found_as_a_message() -> None:
    assert keys_of(message("hi"), None).own != keys_of(chat("hi"), None).own


# Legs


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"stop_sequences": ["x"]},
        {"thinking": {"type": "enabled", "budget_tokens": 20}},
        {"request_id": "mine"},
        {"session_id": "mine"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_prefill_leg_leaves_it_out(fields: dict[str, Any]) -> None:
    assert not set(fields) & set(prefill(message(**fields)))


def test_the_prefill_leg_computes_one_token() -> None:
    sent = prefill(message(system="be brief"))
    assert (sent["max_tokens"], sent["system"]) == (1, "be brief")
    assert sent["kv_transfer_params"]["do_remote_decode"] is True


def test_what_changes_the_prompt_stays() -> None:
    fields: dict[str, Any] = {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
    sent = prefill(message(**fields))
    assert {name: sent[name] for name in fields} == fields


def test_a_format_is_left_out_and_the_effort_is_not() -> None:
    config = {"effort": "low", "format": {"type": "json_schema", "schema": {}}}
    assert prefill(message(output_config=config))["output_config"] == {"effort": "low"}
    assert prefill(message(output_config=config), keep_constraints=("tiny",))["output_config"] == config


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}], ids=str)
def test_a_forced_tool_is_not_forced_on_prefill(choice: Any) -> None:
    body = message(tools=[TOOL], tool_choice=choice)
    assert prefill(body)["tool_choice"] == {"type": "auto"}
    assert decode_alone(body) == ""
    assert decode_alone(body, ("tiny",)) == "tool_choice"


def test_a_turn_is_named_in_a_way_that_vllm_reads() -> None:
    body = message(vllm_xargs={"a": 1, "session_id": "mine"})
    sent = json.loads(decode_body(body, params=None, scope="s", keys=["k"], cache_salt="", labelled=True))
    assert sent["vllm_xargs"] == {"a": 1, "session_id": "backhaul:s:k"}
    assert "session_id" not in sent


@pytest.mark.parametrize(
    ("content", "only"),
    [
        ("hi", True),
        ([text("hi"), {"type": "tool_use", "id": "t", "name": "f", "input": {}}], True),
        ([{"type": "tool_result", "tool_use_id": "t", "content": "3"}], True),
        ([{"type": "tool_result", "tool_use_id": "t", "content": [text("3")]}], True),
        ([{"type": "image", "source": {}}], False),
        ([{"type": ["text"]}], False),
        ([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}], False),
    ],
)
def test_what_is_text_alone(content: Any, only: bool) -> None:
    assert text_only(message(content)) is only
