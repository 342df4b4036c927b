"""`/v1/responses`: what its bodies may hold, the conversation in them, and what a prefill engine is sent of them.

vLLM 0.32 takes ``kv_transfer_params`` and ``cache_salt`` there as on chats (`entrypoints/openai/responses/protocol.py`,
``ResponsesRequest``).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from backhaul_router.core.errors import ApiError, invalid
from backhaul_router.core.transcript import Transcript, present

_CLIENT_TOOLS = ("function", "custom", "namespace")
"""Tools that clients run. Of all others the server runs those that it has: then one request becomes several, each with
the same ``kv_transfer_params`` (`responses/serving.py`, ``_generate_with_builtin_tools``)."""

_SEED_FIELDS = ("tools", "instructions", "reasoning", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs")

_OF_NO_PROMPT = ("id", "status")
"""Of items; clients send them back or leave them out."""

_NOT_REPEATED = frozenset({"input", "kv_transfer_params"})
"""Of a request; by its answer."""

_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
"""Types of parts. No set, which a list from a client could not be looked for in."""

_NOT_PREFILLED = (
    "background",
    "include",
    "top_logprobs",
    "enable_response_messages",
    "stop",
    "include_stop_str_in_output",
    "structured_outputs",
)
"""What says when an answer ends, what it looks like, or what else is told of it."""

_ONE, _FALSE, _AUTO = msgspec.Raw(b"1"), msgspec.Raw(b"false"), msgspec.Raw(b'"auto"')


def check(fields: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for what no engine would serve, or not as it is meant."""
    given = fields.get("input")
    if not isinstance(given, str | list) or not given:
        raise invalid("'input' must be a non-empty string or array", param="input")
    for index, item in enumerate(given if isinstance(given, list) else ()):
        if not isinstance(item, dict):
            raise invalid(f"'input[{index}]' must be an object", param=f"input[{index}]")
    if fields.get("background"):
        raise invalid("'background' is not served here: wait for the answer, or stream it", param="background")
    if fields.get("conversation") is not None:
        raise invalid(
            "'conversation' is not served here, as engines keep none: send what was said as 'input', or the"
            " 'previous_response_id'",
            param="conversation",
        )
    _check_names(fields)


def _check_names(fields: Mapping[str, Any]) -> None:
    """Answers repeat what was asked, and no answer with a name of handles passes: it would look like a fault."""
    for name in fields.keys() - _NOT_REPEATED:
        if b'kv_transfer_params":' in msgspec.json.encode(fields[name]):
            raise invalid(f"nothing in '{name}' may be called kv_transfer_params", param=name)


def not_kept(*, at_engine: bool = False) -> ApiError:
    """Returns the 404 for an earlier response that nobody has."""
    why = (
        "the engine did not keep the earlier response: engines do so only with VLLM_ENABLE_RESPONSES_API_STORE=1"
        if at_engine
        else "no engine here has the earlier response: it was given to somebody else, or its engine has started anew"
    )
    message = f"{why}; send the whole conversation as 'input'"
    return ApiError(404, message, code="previous_response_not_found", param="previous_response_id")


def alone(fields: Mapping[str, Any]) -> str:
    """Returns the field that makes two legs impossible, empty when none does."""
    if fields.get("truncation", "disabled") != "disabled":
        # Truncates to what max_output_tokens leaves, which differs between the legs; so does null.
        return "truncation"
    tools = fields.get("tools") or ()
    return "tools" if any(tool.get("type") not in _CLIENT_TOOLS for tool in tools if isinstance(tool, dict)) else ""


def transcript(fields: Mapping[str, Any]) -> Transcript:
    """Returns the conversation; of one that goes on from an earlier response, only what is new."""
    items = [*map(_plain, _items(fields))]
    answers = [i for i, item in enumerate(items) if i and _is_answer(item) and not _is_answer(items[i - 1])]
    return Transcript({"endpoint": "responses", **present(fields, _SEED_FIELDS)}, items, answers)


def is_text(fields: Mapping[str, Any]) -> bool:
    """Tells whether the input is nothing but text."""
    parts = (part for item in _items(fields) for name in ("content", "output") for part in _list(item.get(name)))
    return all(isinstance(part, dict) and part.get("type") in _TEXTS for part in parts)


def prefill(raw: dict[str, msgspec.Raw], fields: Mapping[str, Any], *, constrained: bool) -> None:
    """Makes a prefill leg of a request's fields. ``constrained``: the model's prompt shows formats and forced tools."""
    for name in _NOT_PREFILLED:
        raw.pop(name, None)
    if not constrained:
        raw.pop("text", None)
        if fields.get("tool_choice") not in (None, "none", "auto"):
            raw["tool_choice"] = _AUTO
    raw["max_output_tokens"] = _ONE
    # What nobody will ask for must not fill the engine's memory: it never forgets a response.
    raw["store"] = _FALSE


def _items(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = fields["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an item as it counts for a prompt: a message need not say that it is one."""
    plain = {name: value for name, value in item.items() if name not in _OF_NO_PROMPT}
    if plain.get("type") == "message":
        del plain["type"]
    return plain


def _is_answer(item: Mapping[str, Any]) -> bool:
    if role := item.get("role"):
        return bool(role == "assistant")
    return not str(item.get("type")).endswith("_output")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
