"""The tokenizer: one token per word.

A generated token ``n`` is the word ``tn``, so an answer that comes back as history is made of the same tokens again.
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backhaul_simulator.model import END, FIRST_WORD

_START = 1
"""Before each message of a chat."""

_ROLES = {"system": 3, "developer": 3, "user": 4, "assistant": 5, "tool": 6}
_TOOLS = 7
_EXTRAS = 8

_WORD = re.compile(r"t\d{1,9}(?!\w)|\w{1,12}|[^\w\s]")

TEMPLATES = ("whole", "drop-reasoning", "last-message")
"""What of a chat's history a template may show to the model."""

_REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)

MAX_TOKEN_CHARS = 12
"""Characters that one token of a text has at most."""

VOCABULARY = 50_000
"""The model's default."""

EOS = END


class MediaError(ValueError):
    """A chat has content that is no text."""


def encode(text: str, *, vocabulary: int = VOCABULARY) -> list[int]:
    """Returns one token per word or punctuation mark. Words of people may share a token."""
    return [_id(word, vocabulary) for word in _WORD.findall(text)]


def decode(token: int) -> str:
    """Returns the text of a generated token; none for a special one."""
    return f" t{token}" if token >= FIRST_WORD else ""


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    extras: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    vocabulary: int = VOCABULARY,
    template: str = "whole",
) -> list[int]:
    """Returns the tokens of a chat.

    ``extras`` are further arguments of the template, which here are simply part of the prompt. An assistant's message
    has the tokens that were generated for it, between those of its role and `EOS`.

    Raises MediaError for content that is no text.
    """
    tokens: list[int] = []
    if tools:
        tokens += [_START, _TOOLS, *encode(_text_of(tools), vocabulary=vocabulary), EOS]
    if extras:
        tokens += [_START, _EXTRAS, *encode(_text_of(extras), vocabulary=vocabulary), EOS]
    for message in _shown(messages, template):
        tokens += [_START, _ROLES.get(str(message.get("role")), _ROLES["user"])]
        tokens += encode("\n".join(_parts(message)), vocabulary=vocabulary)
        tokens.append(EOS)
    if continue_final_message and messages:
        tokens.pop()
    elif add_generation_prompt:
        tokens += [_START, _ROLES["assistant"]]
    return tokens


def _shown(messages: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    if template == "last-message":
        return messages[-1:]
    return [_without_reasoning(message) for message in messages] if template == "drop-reasoning" else messages


def _without_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    return {**message, "reasoning": None, "content": _REASONING.sub("", content)}


def text_of_parts(parts: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a response's parts. Raises MediaError for one that is no text."""
    for part in parts:
        if not isinstance(part.get("text", part.get("refusal")), str):
            raise MediaError(f"At most 0 {part.get('type')}(s) may be provided in one prompt.")
    return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


def _id(word: str, vocabulary: int) -> int:
    if word[0] == "t" and word[1:].isascii() and word[1:].isdigit():
        token = int(word[1:])
        if FIRST_WORD <= token < vocabulary:
            return token
    return FIRST_WORD + zlib.crc32(word.encode()) % (vocabulary - FIRST_WORD)


def _parts(message: Mapping[str, Any]) -> Iterable[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            yield part
        elif part.get("type", "text") in ("text", "refusal"):
            yield str(part.get("text") or part.get("refusal") or "")
        else:
            raise MediaError(f"At most 0 {part['type'].removesuffix('_url')}(s) may be provided in one prompt.")
    for name in ("reasoning", "tool_calls", "tool_call_id", "name"):
        if message.get(name):
            yield _text_of(message[name])


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
