"""Bodies of `/v1/responses`: what is refused, the keys of their turns, the legs, names of responses."""

import json
from typing import Any

import pytest

from backhaul_router.core.body import TurnBody
from backhaul_router.core.errors import ApiError
from backhaul_router.core.kinds import decode_alone, text_only
from backhaul_router.core.legs import decode_body, prefill_body
from backhaul_router.core.lookup import keys_of, response_key
from backhaul_router.core.nodes import Engine, Node, NodeState, Role
from backhaul_router.core.response_ids import keeper_of, response_id_of
from tests.unit.router.bodies import chat, response

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "3"}
FUNCTION = {"type": "function", "name": "f", "parameters": {}}


def prefill(body: TurnBody, **options: Any) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(prefill_body(body, handle=None, cache_salt="", **options))
    return sent


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"background": True}, "background"),
        ({"background": "yes"}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"metadata": {"kv_transfer_params": "x"}}, "metadata"),
        ({"tools": [{"type": "function", "parameters": {"kv_\u0074ransfer_params": {}}}]}, "tools"),
    ],
    ids=str,
)
def test_what_engines_would_not_serve_as_it_is_meant_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        response(**{"given": "hi", **fields} if "input" not in fields else {"given": fields["input"]})
    assert (error.value.status, error.value.param) == (400, param)


def test_an_input_may_speak_of_handles() -> None:
    assert response([{"role": "user", "content": "x", "kv_transfer_params": 1}], instructions='"kv_transfer_params":')


# Keys


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("hi", [USER, ANSWER, USER], id="a text is a message"),
        pytest.param([{**USER, "type": "message"}], [USER, ANSWER, USER], id="a message need not say that it is one"),
        pytest.param([USER], [USER, {"type": "reasoning", "id": "rs", "summary": []}, ANSWER, USER], id="reasoning"),
        pytest.param([USER], [USER, CALL, OUTPUT], id="a call"),
        pytest.param([USER, CALL, OUTPUT], [USER, CALL, OUTPUT, ANSWER, USER], id="what a tool said"),
        pytest.param([USER, ANSWER, USER], [USER, {**ANSWER, "id": "m", "status": "completed"}, USER, ANSWER, USER],
                     id="names of items"),
    ],
)  # fmt: skip
def test_the_next_turn_looks_where_this_one_is_labelled(first: Any, second: Any) -> None:
    assert keys_of(response(second), None).find[0] == keys_of(response(first), None).own


def test_an_answer_of_several_items_is_looked_up_once() -> None:
    keys = keys_of(response([USER, {"type": "reasoning", "summary": []}, CALL, OUTPUT, ANSWER, USER]), None)
    assert len(keys.find) == 2


@pytest.mark.parametrize("fields", [{"instructions": "be brief"}, {"tools": [FUNCTION]}])
def test_what_else_shapes_a_prompt_is_part_of_its_keys(fields: dict[str, Any]) -> None:
    assert keys_of(response(**fields), None).own != keys_of(response(), None).own


def test_a_chat_is_not_found_as_a_response() -> None:
    assert keys_of(response([USER]), None).own != keys_of(chat("hi"), None).own


def test_a_turn_after_a_response_looks_there_and_nowhere_else() -> None:
    keys = keys_of(response("more", previous_response_id="resp_1"), b"session")
    assert keys.find == keys.turns == (response_key("resp_1"),)
    assert keys.proves(keys.find[0])
    assert (keys.own, len(keys.label), keys.continues) == ("", 1, True)
    assert keys.new_byte_count(keys.find[0]) == len('"more"')


# Legs


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"background": False},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
        {"stop": ["\n"], "include_stop_str_in_output": True},
        {"text": {"format": {"type": "json_object"}}},
        {"structured_outputs": {"regex": "a"}},
        {"enable_response_messages": True},
        {"request_id": "mine"},
        {"session_id": "mine"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_prefill_leg_leaves_it_out(fields: dict[str, Any]) -> None:
    assert not set(fields) & set(prefill(response(**fields)))


def test_the_prefill_leg_computes_one_token_and_is_not_kept() -> None:
    sent = prefill(response(max_output_tokens=90, store=True, instructions="be brief"))
    assert (sent["max_output_tokens"], sent["store"], sent["instructions"]) == (1, False, "be brief")
    assert sent["kv_transfer_params"]["do_remote_decode"] is True


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}], ids=str)
def test_a_forced_tool_is_not_forced_on_prefill(choice: Any) -> None:
    body = response(tools=[FUNCTION], tool_choice=choice)
    assert prefill(body)["tool_choice"] == "auto"
    assert prefill(body, keep_constraints=("tiny",))["tool_choice"] == choice


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_other_choices_of_tools_stay(choice: str) -> None:
    assert prefill(response(tools=[FUNCTION], tool_choice=choice))["tool_choice"] == choice


def test_the_decode_leg_says_how_the_response_is_called() -> None:
    sent = json.loads(
        decode_body(response(request_id="mine"), params={}, scope="s", keys=["k"], cache_salt="", response_id="resp_1")
    )
    assert sent["request_id"] == "resp_1"
    assert sent["kv_transfer_params"]["backhaul"]["keys"] == ["k"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"truncation": "disabled"}, ""),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": None}, "truncation"),
        ({"tools": [FUNCTION, {"type": "custom", "name": "g"}]}, ""),
        ({"tools": [{"type": "web_search_preview"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        ({"n": 2}, ""),
    ],
    ids=str,
)
def test_what_one_engine_must_serve_alone(fields: dict[str, Any], why: str) -> None:
    assert decode_alone(response(**fields)) == why


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("hi", True),
        ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, CALL, OUTPUT], True),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], False),
        ([USER, CALL, {**OUTPUT, "output": [{"type": "input_image", "image_url": "x"}]}], False),
        ([{"role": "user", "content": [{"type": {"input_text": 1}}]}], False),
    ],
)
def test_what_is_text_alone(given: Any, text: bool) -> None:
    assert text_only(response(given)) is text


# Names

NONCE = "0123456789abcdef" * 2


def node(name: str, *engine_ids: str) -> Node:
    engines = tuple(Engine(engine_id) for engine_id in engine_ids)
    return Node(name, Role.DECODE, "agent", f"http://{name}:1", frozenset({"tiny"}), engines, NodeState.READY)


def test_a_name_leads_to_the_engine_that_gave_the_response() -> None:
    nodes = [node("a", "e1"), node("b", "e2"), node("c")]
    assert keeper_of(response_id_of(nodes[1], "", NONCE), "", nodes) is nodes[1]


def test_a_name_leads_nowhere_for_another_tenant_or_after_a_restart() -> None:
    name = response_id_of(node("a", "e1"), "blue", NONCE)
    assert keeper_of(name, "blue", [node("a", "e1")]) is not None
    assert keeper_of(name, "red", [node("a", "e1")]) is None
    assert keeper_of(name, "", [node("a", "e1")]) is None
    assert keeper_of(name, "blue", [node("a", "e3")]) is None


@pytest.mark.parametrize("nonce", ["?stream=true&" + "0" * 19, "0" * 31 + "/", "A" * 32, "0" * 31])
def test_a_name_that_an_engine_would_read_as_something_else_leads_nowhere(nonce: str) -> None:
    known = node("a", "e1")
    assert keeper_of(response_id_of(known, "", nonce), "", [known]) is None


@pytest.mark.parametrize("name", ["", "resp_", "resp_" + "0" * 64, "x" * 10_000, "resp_\udcff" * 20])
def test_made_up_names_lead_nowhere(name: str) -> None:
    assert keeper_of(name, "", [node("a", "e1"), node("b")]) is None


def test_a_node_that_has_not_named_its_engine_gives_no_names() -> None:
    assert response_id_of(node("a"), "", NONCE) == ""
