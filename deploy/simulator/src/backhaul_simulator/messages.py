"""``/v1/messages`` as vLLM 0.32 serves it (``entrypoints/anthropic``), for texts: no tool is ever called."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from backhaul_simulator.answers import Step
from backhaul_simulator.openai_bodies import Chat, StreamOptions, parse
from backhaul_simulator.openai_checks import Served
from backhaul_simulator.openai_errors import malformed
from backhaul_simulator.openai_replies import Progress, named_event
from backhaul_simulator.openai_requests import Job, chat_job, chat_tokens

_BILLING = "x-anthropic-billing-header"

Messages = list[dict[str, Any]]


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """``/v1/messages/count_tokens``."""

    model: str
    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessageBody(CountBody, frozen=True, kw_only=True):
    """``/v1/messages``: the fields that are looked at."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    cache_salt: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


def parse_message(raw: bytes, served: Served) -> tuple[Job, "MessageReply"]:
    """Reads a body. Raises RefusedError with what vLLM answers to a bad one."""
    body = parse(raw, MessageBody)
    params = body.kv_transfer_params
    budget = (body.thinking or {}).get("budget_tokens") or 0
    if body.max_tokens <= 0:
        raise malformed("max_tokens must be positive", "body.max_tokens")
    if budget >= body.max_tokens and not (params or {}).get("do_remote_decode"):
        raise malformed("thinking.budget_tokens must be less than max_tokens", "body")
    chat = Chat(
        **_shared(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True, continuous_usage_stats=True) if body.stream else None,
        temperature=body.temperature,
        top_p=body.top_p,
        cache_salt=body.cache_salt,
        kv_transfer_params=params,
        session_id=(body.vllm_xargs or {}).get("session_id"),
    )
    return chat_job(chat, served), MessageReply(served.model)


def count_tokens(raw: bytes, served: Served) -> int:
    """Reads the body of ``/v1/messages/count_tokens``; returns the count. Raises RefusedError."""
    return len(chat_tokens(Chat(**_shared(parse(raw, CountBody))), served))


def _shared(body: CountBody) -> dict[str, Any]:
    system = "".join(text for text in _texts(body.system or []) if not text.startswith(_BILLING))
    messages = [{"role": "system", "content": system}] if system else []
    for message in body.messages:
        messages += _converted(message)
    off = (body.thinking or {}).get("type") == "disabled"
    return {
        "model": body.model,
        "messages": messages,
        "tools": [_function(tool) for tool in body.tools] if body.tools else None,
        "reasoning_effort": "none" if off else (body.output_config or {}).get("effort"),
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def _converted(message: Mapping[str, Any]) -> Messages:
    """Returns a message as chats have it: what tools said comes first (``_convert_messages``)."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    said: Messages = []
    parts: list[Any] = []
    calls: list[Any] = []
    for block in content or []:
        kind = block.get("type")
        if kind == "tool_result":
            text = "\n".join(_texts(block.get("content") or []))
            said.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "text":
            parts.append({"type": "text", "text": block.get("text")})
        elif kind == "image":
            parts.append({"type": "image_url"})
    if parts or calls:
        said.append({"role": role, "content": parts, **({"tool_calls": calls} if calls else {})})
    return said


def _texts(content: str | list[dict[str, Any]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [str(block.get("text") or "") for block in content if block.get("type") == "text"]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": fields}


class MessageReply:
    """Reply to ``/v1/messages``."""

    def __init__(self, model: str) -> None:
        self.name = ""
        self._model = model
        self._open = False

    def accepted(self) -> Iterator[bytes]:
        """Yields nothing: the first event comes with the first token."""
        yield from ()

    def opening(self) -> Iterator[bytes]:
        """Yields nothing: how many tokens the prompt has is known with the first step."""
        yield from ()

    def piece(self, step: Step, *, first: bool, usage: Mapping[str, Any] | None) -> bytes:
        """Returns the events of a step; ``first`` brings who speaks."""
        events = [self._begun(usage or {})] if first else []
        if step.text:
            if not self._open:
                self._open = True
                block = {"type": "text", "text": ""}
                events.append(named_event({"type": "content_block_start", "content_block": block, "index": 0}))
            delta = {"type": "text_delta", "text": step.text}
            events.append(named_event({"type": "content_block_delta", "delta": delta, "index": 0}))
        return b"".join(events)

    def closing(self, progress: Progress) -> Iterator[bytes]:
        """Yields the events after the last token."""
        if self._open:
            yield named_event({"type": "content_block_stop", "index": 0})
        reason, stop = _reason(progress)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield named_event({"type": "message_delta", "delta": delta, "usage": _usage(progress.usage())})
        yield named_event({"type": "message_stop"})

    def failed(self, document: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the event of an error, which is the last one."""
        error = {"type": "internal_error", "message": document["error"]["message"]}
        yield named_event({"type": "error", "error": error})

    def whole(self, progress: Progress) -> dict[str, Any]:
        """Returns the document of a reply that is not streamed."""
        reason, stop = _reason(progress)
        document = {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": progress.choices[0].text}],
            "model": self._model,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(progress.usage()),
            "kv_transfer_params": progress.kv_transfer_params,
        }
        return {name: value for name, value in document.items() if value is not None}

    def _begun(self, usage: Mapping[str, Any]) -> bytes:
        message: dict[str, Any] = {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"output_tokens": 0, "input_tokens": usage.get("prompt_tokens", 0)},
        }
        return named_event({"type": "message_start", "message": message})


def _reason(progress: Progress) -> tuple[str, str | None]:
    choice = progress.choices[0]
    if choice.finish_reason == "length":
        return "max_tokens", None
    stop = choice.stop_reason
    return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
    }
