"""Bodies of clients' requests, and all that a router makes of them, turns or not."""

from typing import Any, TypeVar

import msgspec

from backhaul_connector.wire import PARAMS_KEY
from backhaul_router.core.body import Endpoint, TurnBody, parse_body
from backhaul_router.core.errors import ApiError
from backhaul_router.core.kinds import decode_alone, text_only, tokens_certain
from backhaul_router.core.legs import decode_body, prefill_body, prompt_tokens_in, tokenize_body
from backhaul_router.core.lookup import keys_of, scope_of
from backhaul_router.core.media import check_media
from backhaul_router.core.passing import PASSED, parse_passed
from backhaul_router.core.response_ids import keeper_of, response_id_of
from tests.fuzz.inputs import Source, json_of, made_of, one_of, samples_of
from tests.fuzz.routers import NODE
from tests.fuzz.target import Target

T = TypeVar("T")

_FORBIDDEN = {"request_id", "session_id", "ec_transfer_params"}
_OURS = {"do_remote_prefill": msgspec.Raw(b"true")}
_STOLEN = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_engine_id": "e", "remote_block_ids": [[1]]}

_CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "user", "content": "more"},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "session_id": "s",
    "conversation_id": "c",
    "cache_salt": "mine",
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "n": 1,
    "max_completion_tokens": 5,
}
_STOLEN_CHAT = {
    **_CHAT,
    "kv_transfer_params": _STOLEN,
    "request_id": "another",
    "ec_transfer_params": {},
    "vllm_xargs": {"kv_transfer_params": _STOLEN, "session_id": "s", "x": 1},
}
_COMPLETION = {
    "model": "m",
    "prompt": [1, 2, 3],
    "max_tokens": 5,
    "best_of": 1,
    "truncate_prompt_tokens": 4,
    "suffix": None,
    "kv_transfer_params": _STOLEN,
}
_RESPONSE = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}], "id": "1"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": "7"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "truncation": "disabled",
    "max_output_tokens": 5,
    "store": False,
    "stream": True,
    "kv_transfer_params": _STOLEN,
    "request_id": "another",
}
_NEXT_RESPONSE = {"model": "m", "input": "more", "previous_response_id": "resp_1", "vllm_xargs": {"session_id": "s"}}
_MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}]}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any"},
    "thinking": {"type": "enabled", "budget_tokens": 4},
    "output_config": {"effort": "low", "format": {"type": "json_schema"}},
    "stop_sequences": ["x"],
    "max_tokens": 5,
    "kv_transfer_params": _STOLEN,
    "vllm_xargs": {"kv_transfer_params": _STOLEN, "session_id": "s", "x": 1},
}
_UNSALTED = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_PASSED = (
    {
        "model": "m",
        "input": ["a", "b"],
        "cache_salt": "mine",
        "kv_transfer_params": _STOLEN,
        "vllm_xargs": {"kv_transfer_params": _STOLEN, "x": 1},
    },
    {"model": "m", "query": {"content": [{"type": "image_url", "uuid": None}]}, "documents": [["a"], {"text": "b"}]},
    {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [], "request_id": "another"},
)


def _accepts(given: tuple[Endpoint, bytes]) -> bool:
    endpoint, data = given
    try:
        body = parse_body(endpoint, data)
        keys = keys_of(body, None)
    except ApiError as error:
        msgspec.json.decode(error.body)
        return False
    scope = scope_of(model=body.model, cache_salt=body.cache_salt, tenant="t")
    _check_engine_body(prefill_body(body, handle=None, cache_salt="salt"))
    _check_engine_body(
        decode_body(body, params=_OURS, scope=scope, keys=keys.label, continues=keys.find, cache_salt="salt")
    )
    _check_session(
        body.endpoint, decode_body(body, params=None, scope=scope, keys=["key"], cache_salt="salt", labelled=True)
    )
    _kinds(body)
    return True


def _check_engine_body(raw: bytes) -> None:
    """Nothing of the client's names hosts, requests or turns, and the salt is the router's."""
    fields: dict[str, Any] = msgspec.json.decode(raw)
    params = fields["kv_transfer_params"]
    assert not params.get("remote_host"), params
    assert params.keys() <= {*_OURS, PARAMS_KEY} or params["do_remote_decode"] is True, params
    assert not fields.keys() & _FORBIDDEN, fields.keys()
    assert not (fields.get("vllm_xargs") or {}).keys() & {*_FORBIDDEN, "kv_transfer_params"}
    assert fields["cache_salt"] == "salt"


def _check_session(endpoint: Endpoint, raw: bytes) -> None:
    """A turn's name is the router's, too, where it is told without a hand-off."""
    fields: dict[str, Any] = msgspec.json.decode(raw)
    assert not fields.keys() & {"kv_transfer_params", "request_id", "ec_transfer_params"}, fields.keys()
    named = fields["vllm_xargs"] if endpoint is Endpoint.MESSAGES else fields
    assert named["session_id"].startswith("backhaul:")


def _kinds(body: TurnBody) -> None:
    prompt_tokens_in(body)
    for constraints in ((), ("m",)):
        decode_alone(body, constraints)
        prefill_body(body, handle=None, cache_salt="salt", keep_constraints=constraints)
    text_only(body)
    if tokens_certain(body):
        tokenize_body(body)


def _passed(given: tuple[str, bytes]) -> bool:
    path, data = given
    try:
        body = parse_passed(path, data)
        check_media(body.fields)
    except ApiError as error:
        msgspec.json.decode(error.body)
        return False
    sent: dict[str, Any] = msgspec.json.decode(body.for_engine("salt"))
    for fields in (sent, sent.get("vllm_xargs") or {}):
        assert not fields.keys() & {*_FORBIDDEN, "kv_transfer_params"}, fields.keys()
    assert sent.get("cache_salt") == "salt" or path in _UNSALTED
    return True


def _names(name: bytes) -> bool:
    # As a path is decoded; a body's text may hold half letters besides.
    text = name.decode("utf-8", "surrogateescape")
    keeper = keeper_of(text, "t", [NODE])
    assert (keeper is NODE) == (text.removeprefix("resp_") == _NAME.removeprefix("resp_"))
    return keeper is NODE


_NAME = response_id_of(NODE, "t", "0" * 32)


def _with(bodies: Source[bytes], endpoint: T) -> Source[tuple[T, bytes]]:
    return made_of(bodies, lambda body: (endpoint, body))


TARGETS = (
    Target(
        "client bodies",
        (
            "backhaul_router.core.body:_decode",
            "backhaul_router.core.body:_decode_raw",
            "backhaul_router.core.lookup:keys_of",
            "backhaul_router.core.legs:_decode_xargs",
        ),
        one_of(
            _with(json_of(_CHAT, _STOLEN_CHAT), Endpoint.CHAT),
            _with(json_of(_COMPLETION), Endpoint.COMPLETIONS),
            _with(json_of(_RESPONSE, _NEXT_RESPONSE), Endpoint.RESPONSES),
            _with(json_of(_MESSAGES), Endpoint.MESSAGES),
        ),
        _accepts,
    ),
    Target(
        "bodies that are passed on",
        ("backhaul_router.core.passing:_decode", "backhaul_router.core.passing:_decode_raw"),
        one_of(*(_with(json_of(*_PASSED), path) for path in PASSED)),
        _passed,
    ),
    Target(
        "names of responses",
        ("backhaul_router.core.response_ids:keeper_of",),
        samples_of(_NAME.encode(), response_id_of(NODE, "another", "0" * 32).encode()),
        _names,
    ),
)
