"""`/v1/messages`, Anthropic's form of chats: what its bodies must have, the conversation in them, the prefill leg.

vLLM 0.32 makes a chat of such a request and takes ``kv_transfer_params`` and ``cache_salt`` along
(`entrypoints/anthropic/serving.py`, ``to_chat_completion_request``).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from backhaul_router.core.errors import invalid
from backhaul_router.core.transcript import Transcript, present

_SEED_FIELDS = ("chat_template_kwargs",)

_BILLING = "x-anthropic-billing-header"
"""How a text begins that some clients put first, another one each time; vLLM leaves it out of prompts."""

_TEXTS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_reference")
"""Types of parts. No set, which a list from a client could not be looked for in."""

_FORCED = ("any", "tool")

_ONE, _AUTO = msgspec.Raw(b"1"), msgspec.Raw(b'{"type":"auto"}')


def check(fields: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for what the decode engine would refuse after the prefill engine's work."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("'messages' must be a non-empty array", param="messages")
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"'{name}' must be an object with a role", param=name)
        _check_content(message.get("content"), f"{name}.content")
    if fields.get("system") is not None:
        _check_content(fields["system"], "system")
    _check_limits(fields)


def _check_content(content: object, name: str) -> None:
    if isinstance(content, str) or (isinstance(content, list) and all(isinstance(block, dict) for block in content)):
        return
    raise invalid(f"'{name}' must be a string or an array of objects", param=name)


def _check_limits(fields: Mapping[str, Any]) -> None:
    limit = fields.get("max_tokens")
    if not isinstance(limit, int) or limit < 1:
        raise invalid("'max_tokens' must be a positive integer", param="max_tokens")
    budget = (fields.get("thinking") or {}).get("budget_tokens")
    if isinstance(budget, int) and budget >= limit:
        raise invalid("'thinking.budget_tokens' must be less than 'max_tokens'", param="thinking")


def alone(fields: Mapping[str, Any], *, constrained: bool) -> str:
    """Returns the field that makes two legs impossible, empty when none does.

    ``constrained``: the model's prompt shows forced tools. Forced to one token, a call is no JSON, and vLLM refuses it.
    """
    return "tool_choice" if constrained and _forces(fields) else ""


def transcript(fields: Mapping[str, Any]) -> Transcript:
    """Returns the conversation, without marks for a cache: they move from turn to turn."""
    seed = {"endpoint": "messages", **present(fields, _SEED_FIELDS), "tools": _unmarked(fields.get("tools") or [])}
    system = [block for block in _blocks(fields.get("system") or []) if not _is_billing(block)]
    messages = [{**message, "content": _blocks(message["content"])} for message in fields["messages"]]
    answers = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    return Transcript({**seed, "system": system}, messages, answers)


def is_text(fields: Mapping[str, Any]) -> bool:
    """Tells whether the messages are nothing but text."""
    return all(map(_is_text, (block for message in fields["messages"] for block in _blocks(message["content"]))))


def prefill(raw: dict[str, msgspec.Raw], fields: Mapping[str, Any], *, constrained: bool) -> None:
    """Makes a prefill leg of a request's fields. ``constrained``: the model's prompt shows formats."""
    raw.pop("stop_sequences", None)
    if (fields.get("thinking") or {}).get("type") == "enabled":
        # Nothing but a budget for the answer. What disables thinking is told to the template.
        del raw["thinking"]
    if not constrained:
        if fields.get("output_config"):
            shown = {name: value for name, value in fields["output_config"].items() if name != "format"}
            raw["output_config"] = msgspec.Raw(msgspec.json.encode(shown))
        if _forces(fields):
            raw["tool_choice"] = _AUTO
    raw["max_tokens"] = _ONE


def _forces(fields: Mapping[str, Any]) -> bool:
    choice = fields.get("tool_choice")
    return isinstance(choice, dict) and choice.get("type") in _FORCED


def _blocks(content: str | list[dict[str, Any]]) -> list[Any]:
    """Returns content as blocks: a text is short for a single one."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*map(_unmarked, blocks)]


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_unmarked, value)]
    if not isinstance(value, dict):
        return value
    return {
        name: _unmarked(item) if name == "content" else item
        for name, item in value.items()
        if name != "cache_control" and item is not None
    }


def _is_billing(block: Mapping[str, Any]) -> bool:
    return str(block.get("text")).startswith(_BILLING)


def _is_text(block: Any) -> bool:
    if not isinstance(block, dict):
        return False
    if block.get("type") == "tool_result":
        content = block.get("content")
        return not isinstance(content, list) or all(map(_is_text, content))
    return block.get("type") in _TEXTS
