"""Kinds of requests: which a decode engine must serve alone, and which are text."""

from collections.abc import Collection, Mapping
from typing import Any

from backhaul_router.core import messages, responses
from backhaul_router.core.body import Endpoint, TurnBody

_HARMONY = ("gpt-oss", "gpt_oss")
"""Parts of names of models whose chats vLLM does not tokenize by a template (`renderers/online_renderer.py`)."""


def constrained(body: TurnBody, keep_constraints: Collection[str]) -> bool:
    """Tells whether the model's prompt shows response formats and forced tools: part of its name is among these."""
    return any(part in body.model.lower() for part in keep_constraints)


def decode_alone(body: TurnBody, keep_constraints: Collection[str] = ()) -> str:
    """Returns the field that makes two legs impossible, empty when none does.

    A hand-off serves one sequence (``n``, ``best_of``, beams, lists of prompts: vllm-project/vllm#50559), and a decode
    engine that was handed blocks has no logits of the prompt (``prompt_logprobs``, ``echo``: vllm-project/vllm#50792).
    """
    fields = body.fields
    if body.endpoint is Endpoint.RESPONSES:
        return responses.alone(fields)
    if body.endpoint is Endpoint.MESSAGES:
        return messages.alone(fields, constrained=constrained(body, keep_constraints))
    for name in ("n", "best_of"):
        if (fields.get(name) or 1) > 1:
            return name
    for name in ("use_beam_search", "echo", "prompt_embeds"):
        if fields.get(name):
            return name
    if fields.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if (fields.get("truncate_prompt_tokens") or 0) < 0:
        # Truncates to what max_tokens leaves, which differs between the legs.
        return "truncate_prompt_tokens"
    return "prompt" if _many(fields.get("prompt")) else ""


def text_only(body: TurnBody) -> bool:
    """Tells whether the prompt is nothing but text, or tokens: then its tokens say all that an engine computes from."""
    if body.endpoint is Endpoint.RESPONSES:
        return responses.is_text(body.fields)
    if body.endpoint is Endpoint.MESSAGES:
        return messages.is_text(body.fields)
    chat = body.fields["messages"] if body.endpoint is Endpoint.CHAT else ()
    return all(_is_text(message.get("content")) for message in chat)


def tokens_certain(body: TurnBody) -> bool:
    """Tells whether `/tokenize` gives exactly the tokens that the engine would compute the request from.

    It does not know ``truncate_prompt_tokens`` and ``suffix``, and no ``tool_choice``: with "none" a server may leave
    the tools out (``--exclude-tools-when-tool-choice-none``). Chats of gpt-oss become tokens in another way there.
    """
    fields = body.fields
    if body.endpoint in (Endpoint.RESPONSES, Endpoint.MESSAGES):
        return False
    if fields.get("truncate_prompt_tokens") is not None or fields.get("suffix") is not None:
        return False
    if body.endpoint is Endpoint.CHAT and any(part in body.model.lower() for part in _HARMONY):
        return False
    return not (fields.get("tools") and _no_tool(fields))


def _is_text(content: Any) -> bool:
    if not isinstance(content, list):
        return True
    return all(isinstance(part, dict) and part.get("type") == "text" for part in content)


def _no_tool(fields: Mapping[str, Any]) -> bool:
    return fields.get("tool_choice") == "none"


def _many(prompt: Any) -> bool:
    """Tells whether a prompt is a list of prompts; a list of token ids is one prompt."""
    return isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
