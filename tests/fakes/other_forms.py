"""Answers of `/v1/responses` and `/v1/messages` as vLLM 0.32 forms them, for an engine that says a fixed text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def whole_response(body: Mapping[str, Any], text: str, usage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document of a response."""
    return {
        "id": body.get("request_id", "resp_engine"),
        "created_at": 1,
        "object": "response",
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": body["model"],
        "output": [_item(text)],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": body.get("tools", []),
        "background": False,
        "max_output_tokens": body.get("max_output_tokens", 100),
        "previous_response_id": body.get("previous_response_id"),
        "service_tier": "auto",
        "status": "completed",
        "truncation": "disabled",
        "usage": response_usage(usage),
        "kv_transfer_params": None,
    }


def response_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns usage as responses count it."""
    details = usage.get("prompt_tokens_details") or {"cached_tokens": 0}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **details, "cached_tokens_per_turn": []},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def whole_message(body: Mapping[str, Any], text: str, usage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document of a message."""
    return {
        "id": "chatcmpl-x",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": body["model"],
        "stop_reason": "end_turn",
        "usage": message_usage(usage),
    }


def message_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns usage as messages count it."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    rest = {"input_tokens": usage["prompt_tokens"] - (cached or 0), "output_tokens": usage["completion_tokens"]}
    return rest if cached is None else {**rest, "cache_read_input_tokens": cached}


def response_events(body: Mapping[str, Any], pieces: Sequence[str], usage: Mapping[str, Any]) -> list[bytes]:
    """Returns the events of a streamed response."""
    document = whole_response(body, "".join(pieces), usage)
    begun = {**document, "output": [], "usage": None, "status": "in_progress"}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    item = _item("".join(pieces))
    part = item["content"][0]
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        *({"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []} for piece in pieces),
        {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": document},
    ]
    return [named({**event, "sequence_number": number}) for number, event in enumerate(events)]


def message_events(body: Mapping[str, Any], pieces: Sequence[str], usage: Mapping[str, Any]) -> list[bytes]:
    """Returns the events of a streamed message."""
    begun = {**whole_message(body, "", usage), "content": [], "stop_reason": None}
    begun["usage"] = {"input_tokens": usage["prompt_tokens"], "output_tokens": 0}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
            for piece in pieces
        ),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": message_usage(usage)},
        {"type": "message_stop"},
    ]
    return [*map(named, events)]


def named(document: Mapping[str, Any]) -> bytes:
    """Returns an event that is named after its type."""
    return f"event: {document['type']}\ndata: {json.dumps(document)}\n\n".encode()


def _item(text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
