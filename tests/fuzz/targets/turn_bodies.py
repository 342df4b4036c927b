"""Bodies of clients' requests, and all that a router makes of them."""

from typing import Any

import msgspec

from backhaul_connector.wire import PARAMS_KEY
from backhaul_router.core.body import Endpoint, TurnBody, parse_body
from backhaul_router.core.errors import ApiError
from backhaul_router.core.kinds import decode_alone, text_only, tokens_certain
from backhaul_router.core.legs import decode_body, prefill_body, prompt_tokens_in, tokenize_body
from backhaul_router.core.lookup import keys_of, scope_of
from tests.fuzz.inputs import json_of, made_of, one_of
from tests.fuzz.target import Target

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
    tokenize_body(body)
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


def _kinds(body: TurnBody) -> None:
    prompt_tokens_in(body)
    decode_alone(body)
    text_only(body)
    tokens_certain(body)


TARGETS = (
    Target(
        "client bodies",
        (
            "backhaul_router.core.body:_decode",
            "backhaul_router.core.body:_decode_raw",
            "backhaul_router.core.lookup:keys_of",
        ),
        one_of(
            made_of(json_of(_CHAT, _STOLEN_CHAT), lambda body: (Endpoint.CHAT, body)),
            made_of(json_of(_COMPLETION), lambda body: (Endpoint.COMPLETIONS, body)),
        ),
        _accepts,
    ),
)
