"""What engines answer to a router: legs, streams, errors, lists."""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from backhaul_router.core.body import Endpoint
from backhaul_router.core.clean_lines import CleanLines, without_params
from backhaul_router.core.engine_lists import models_in, tokens_in
from backhaul_router.core.errors import engine_answer
from backhaul_router.core.legs import hand_off
from backhaul_router.core.opening import failed_whole, opening_of
from backhaul_router.core.usage import PromptUsage, UsageLines, with_prompt
from backhaul_router.passing import _explained
from tests.fakes.other_forms import message_events, named, response_events, whole_message, whole_response
from tests.fuzz.inputs import in_pieces, json_of, samples_of
from tests.fuzz.target import Target

_PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_block_ids": [[1, 2]]}
_USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
_REPLY: dict[str, Any] = {
    "id": "x",
    "choices": [{"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "Hel"}}],
    "usage": _USAGE,
    "kv_transfer_params": {**_PARAMS, "backhaul": {"prompt": 9, "local": 4, "read": 0, "verified": 1, "spent": False}},
}
_PROMPT = PromptUsage(7, b'{"cached_tokens":3}')
_PARAMS_LEFT = re.compile(rb'"kv_transfer_params"\s*:\s*[^\sn]')


def _reply(data: bytes) -> bool:
    read = hand_off(data)
    assert read.name is None or all(isinstance(part, str) for part in read.name)
    failed_whole(data)
    assert read.usage is None or (read.usage.cached or 0) >= 0
    try:
        shown = with_prompt(without_params(data), _PROMPT)
    except ValueError:
        return False
    assert "kv_transfer_params" not in _fields(shown)
    return read.params is not None


def _fields(document: bytes) -> dict[str, msgspec.Raw]:
    """Returns the fields of an answer; a document that is none has no handles that a client would find."""
    try:
        return msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return {}


def _stream_of(endpoint: Endpoint) -> Callable[[tuple[bytes, ...]], bool]:
    def accepts(pieces: tuple[bytes, ...]) -> bool:
        opening_of(b"".join(pieces))
        lines, usage = CleanLines(endpoint), UsageLines(_PROMPT)
        shown = b""
        try:
            for piece in pieces:
                shown += usage.feed(lines.feed(piece))
            shown += usage.feed(lines.rest()) + usage.rest()
        except ValueError:
            return False
        assert not _PARAMS_LEFT.search(shown)
        return lines.done

    return accepts


def _whole(data: bytes) -> bool:
    try:
        shown = with_prompt(without_params(data), _PROMPT)
    except ValueError:
        return False
    fields = _fields(shown)
    assert "kv_transfer_params" not in fields
    return "usage" in fields


def _error(data: bytes) -> bool:
    error = engine_answer(400, data, {"retry-after": "1", "x-host": "10.0.0.9"})
    assert len(error.body) < 64_000
    msgspec.json.decode(error.body)
    assert error.headers == {"retry-after": "1"}
    return error.message != "the engine refused the request"


def _tokens(data: bytes) -> bool:
    return bool(tokens_in(data))


def _models(data: bytes) -> bool:
    try:
        models = models_in(data)
    except ValueError:
        return False
    msgspec.json.encode(models)
    return True


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


_CHUNK = {"choices": [{"index": 0, "delta": {"content": "Hel"}, "finish_reason": None}]}
_STREAM = (
    _event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    + _event(_CHUNK)
    + _event({**_CHUNK, "usage": _USAGE, "kv_transfer_params": _PARAMS})
    + b"data: [DONE]\n\n"
)
_COUNTED = {**_USAGE, "total_tokens": 11}
_RESPONSE = {**whole_response({"model": "m"}, "Hello", _COUNTED), "kv_transfer_params": _PARAMS}
_RESPONSE_STREAM = b"".join(response_events({"model": "m"}, ["Hel", "lo"], _COUNTED)) + named(
    {"type": "response.completed", "response": _RESPONSE}
)
_MESSAGE_STREAM = b"".join(message_events({"model": "m"}, ["Hel", "lo"], _COUNTED))
_FAILED = _event({"choices": [{"delta": {"role": "assistant"}}]}) + _event({"error": {"code": 500, "message": "x"}})

_ERRORS = ({"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}, {"message": "no"})

TARGETS = (
    Target(
        "prefill replies",
        (
            "backhaul_router.core.legs:_decode_reply",
            "backhaul_router.core.legs:_decode_usage",
            "backhaul_router.core.legs:_decode_verdict",
            "backhaul_router.core.legs:_decode_text",
            "backhaul_router.core.legs:_decode_fields",
            "backhaul_router.core.usage:_decode_fields",
            "backhaul_router.core.usage:_decode_count",
            "backhaul_router.core.usage:_decode_details_or_null",
        ),
        json_of(
            _REPLY,
            {**whole_response({"model": "m"}, "x", _COUNTED), "kv_transfer_params": _PARAMS},
            {**whole_message({"model": "m"}, "x", _COUNTED), "kv_transfer_params": _PARAMS},
        ),
        _reply,
    ),
    Target(
        "whole answers",
        ("backhaul_router.core.clean_lines:_decode_fields",),
        json_of(_REPLY, _RESPONSE, whole_message({"model": "m"}, "x", _COUNTED)),
        _whole,
    ),
    Target("answers that are passed on", ("backhaul_router.passing:_explained",), json_of(*_ERRORS), _explained),
    Target(
        "decode streams",
        ("backhaul_router.core.opening:_decode", "backhaul_router.core.sse:WholeLines"),
        in_pieces(samples_of(_STREAM, _STREAM.replace(b"\n", b"\r\n"), _FAILED)),
        _stream_of(Endpoint.CHAT),
    ),
    Target(
        "streams of responses",
        ("backhaul_router.core.clean_lines:CleanLines",),
        in_pieces(samples_of(_RESPONSE_STREAM)),
        _stream_of(Endpoint.RESPONSES),
    ),
    Target(
        "streams of messages",
        ("backhaul_router.core.usage:UsageLines",),
        in_pieces(samples_of(_MESSAGE_STREAM)),
        _stream_of(Endpoint.MESSAGES),
    ),
    Target(
        "engine errors",
        ("backhaul_router.core.errors:_fault_in",),
        json_of(*_ERRORS),
        _error,
    ),
    Target(
        "token lists",
        ("backhaul_router.core.engine_lists:_decode_tokens",),
        json_of({"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]}),
        _tokens,
    ),
    Target(
        "model lists",
        ("backhaul_router.core.engine_lists:_decode_models",),
        json_of({"object": "list", "data": [{"id": "m", "parent": None}, {"id": "a", "parent": "m"}]}),
        _models,
    ),
)
